"""Sharded sources: how they are named, what is refused, and that they are the images that `load_images` reads."""

from __future__ import annotations

import functools
import gc
import http.server
import io
import json
import secrets
import shutil
import tarfile
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import sfumato as sf
from sfumato import cli
from sfumato.cluster import ShardedImages, open_shards
from sfumato.data import DataError, ImageSet, load_images, save_images
from sfumato.data import shards as shards_module
from sfumato.data.shards import decode_shard, split_images
from sfumato.data.storage import FileRows
from tests.cluster.conftest import pixels, vault_of, write_tar

pytestmark = pytest.mark.filterwarnings("ignore:.*holds fewer than:sfumato.data.DataWarning")


def whole(images: ShardedImages) -> torch.Tensor:
    """Return all pixels of an image set in this process, in the order of the manifest."""
    held = images.executor._worker._held  # type: ignore[attr-defined]
    parts = [held[entry.owner, entry.number].pixels for entry in images.entries if entry.records]
    return torch.cat([part[torch.arange(len(part))] for part in parts])


def assert_same_images(images: ShardedImages, expected: ImageSet) -> None:
    """Compare images and labels in any order: a source without shard files is divided at random."""

    def rows(pixels: torch.Tensor, labels: torch.Tensor | None) -> list[tuple[bytes, int]]:
        assert labels is not None
        return sorted(zip((each.numpy().tobytes() for each in pixels), labels.tolist(), strict=True))

    assert rows(whole(images), images.outline.labels) == rows(expected.images, expected.labels)


@pytest.mark.parametrize("pattern", ["", "*.tar", "w-{000..002}.tar", "w-00[012].tar", "w-{000,001,002}.tar"])
def test_local_names(shards: Path, digits: ImageSet, pattern: str) -> None:
    images = open_shards(shards / pattern if pattern else shards, classes=10, mode="grey")
    assert torch.equal(whole(images), digits.images)
    assert images.outline.labels is not None
    assert torch.equal(images.outline.labels, digits.labels)
    assert [line.records for line in images.manifest()] == [20, 20, 20]
    assert images.public().classes == tuple(str(number) for number in range(10))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server(shards: Path) -> Iterator[str]:
    """Serve the shards on the loopback."""
    handler = functools.partial(Quiet, directory=str(shards))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_address[1]}"
        serving.shutdown()
        thread.join()


def test_shards_by_url(shards: Path, server: str, digits: ImageSet) -> None:
    assert torch.equal(whole(open_shards(f"{server}/w-{{000..002}}.tar", classes=10)), digits.images)
    with pytest.raises(DataError, match=r"w-003\.tar cannot be read"):
        open_shards(f"{server}/w-{{000..003}}.tar", classes=10)


@pytest.mark.parametrize("pattern", ["", "/*.tar", "/w-{000..002}.tar"])
def test_shards_in_an_object_store(shards: Path, digits: ImageSet, pattern: str) -> None:
    memory = fsspec.filesystem("memory")
    for path in shards.iterdir():
        memory.pipe(f"/bucket/{path.name}", path.read_bytes())
    try:
        assert torch.equal(whole(open_shards(f"memory://bucket{pattern}", classes=10)), digits.images)
    finally:
        memory.rm("/bucket", recursive=True)


def test_parquet_and_folders_and_hugging_face(digits: ImageSet, tmp_path: Path) -> None:
    from sfumato.data.python_datasets import to_hugging_face

    (tmp_path / "parquet").mkdir()
    for number in range(3):
        save_images(digits.subset(range(20 * number, 20 * number + 20)), tmp_path / f"parquet/{number}.parquet")
    save_images(digits, tmp_path / "folders")
    to_hugging_face(digits).save_to_disk(str(tmp_path / "saved"))
    assert torch.equal(whole(open_shards(tmp_path / "parquet", mode="grey")), digits.images)
    assert_same_images(open_shards(tmp_path / "saved", mode="grey"), digits)
    more = open_shards(tmp_path / "parquet", mode="grey", classes=["none", *digits.classes])
    assert more.outline.labels is not None
    assert torch.equal(more.outline.labels, digits.labels + 1)  # type: ignore[operator]
    folders = open_shards(tmp_path / "folders", mode="grey")
    assert_same_images(folders, sf.load_images(tmp_path / "folders", mode="grey"))


def test_a_manifest_is_written_and_checked(shards: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    first = open_shards(shards, classes=10, manifest=manifest)
    assert len(json.loads(manifest.read_text())["shards"]) == 3
    assert open_shards(shards, classes=10, manifest=manifest).manifest() == first.manifest()
    shard = shards / "w-001.tar"
    content = shard.read_bytes()
    shard.write_bytes(content[:-10240])  # truncated, but a readable tar
    with pytest.raises(DataError, match="was changed since it was first read"):
        open_shards(shards, classes=10, manifest=manifest)
    shard.unlink()
    with pytest.raises(DataError, match=r"w-001\.tar is missing"):
        open_shards(shards, classes=10, manifest=manifest)
    shard.write_bytes(content)
    shutil.copy(shard, shards / "w-009.tar")
    with pytest.raises(DataError, match=r"w-009\.tar is not in the manifest"):
        open_shards(shards, classes=10, manifest=manifest)
    content_of = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content_of, "shards": [*content_of["shards"], content_of["shards"][0]]}))
    with pytest.raises(DataError, match="lists a shard twice"):
        open_shards(shards, classes=10, manifest=manifest)
    manifest.write_text("{}")
    with pytest.raises(DataError, match="is not a manifest"):
        open_shards(shards, classes=10, manifest=manifest)


def test_what_is_refused(shards: Path, digits: ImageSet) -> None:
    with pytest.raises(DataError, match="listed twice"):
        open_shards(shards / "w-{000,001,001}.tar", classes=10)
    shutil.copy(shards / "w-000.tar", shards / "w-005.tar")
    with pytest.raises(DataError, match=r"w-005\.tar has the same content as .*w-000\.tar"):
        open_shards(shards, classes=10)
    (shards / "w-005.tar").write_bytes((shards / "w-000.tar").read_bytes()[:1500])
    with pytest.raises(DataError, match=r"w-005\.tar"):
        open_shards(shards, classes=10)
    with tarfile.open(shards / "w-000.tar") as archive:
        begins = archive.getmembers()[10].offset
    for end in (begins, begins + 100):  # between two images: it could be read
        (shards / "w-005.tar").write_bytes((shards / "w-000.tar").read_bytes()[:end])
        with pytest.raises(DataError, match=r"w-005\.tar .* truncated"):
            open_shards(shards, classes=10)
    (shards / "w-005.tar").unlink()
    with pytest.raises(DataError, match="does not exist"):
        open_shards(shards / "w-{000..003}.tar", classes=10)
    with pytest.raises(DataError, match="no file matches"):
        open_shards(shards / "x*.tar", classes=10)
    large = ImageSet(digits.images.repeat(1, 1, 2, 2)[:20], digits.labels[:20], digits.classes)  # type: ignore[index]
    write_tar(shards / "w-006.tar", large)
    with pytest.raises(DataError, match=r"w-006\.tar has images of another size"):
        open_shards(shards, classes=10)
    assert open_shards(shards, classes=10, size=8).shape == (1, 8, 8)


def test_a_shard_that_changes_before_a_query_stops_the_run_in_words(shards: Path) -> None:
    images = open_shards(shards, classes=10)
    vault = vault_of(images)
    images.executor.close()  # as if a worker was started again
    path = shards / "w-001.tar"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(DataError, match=r"w-001\.tar was changed .*Nothing was released; what was charged stays"):
        vault.counts()
    path.write_bytes(content[:1500])  # no readable tar: it is hashed before it is parsed
    with pytest.raises(DataError, match=r"w-001\.tar was changed .*Nothing was released"):
        vault.sum(pixels, release="sampled", bound=1.0)
    path.unlink()
    with pytest.raises(DataError, match=r"w-001\.tar cannot be read"):
        vault.sum(pixels, release="sum", bound=1.0)
    assert vault.ledger.void is None
    assert [entry["name"] for entry in vault.ledger.entries[1:]] == ["counts", "sampled", "sum"]


@pytest.mark.parametrize("kind", ["tar", "folder"])
def test_workers_find_relative_names_from_another_folder(
    shards: Path, digits: ImageSet, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_images(digits, tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    images = open_shards("shards/*.tar" if kind == "tar" else "folder", classes=10, mode="grey")
    assert {line.name.partition("/")[0].partition(" ")[0] for line in images.manifest()} == {
        "shards" if kind == "tar" else "folder"
    }  # names stay as they were given, so that the set may move with its manifest
    vault = vault_of(images)
    images.executor.close()  # as if a worker was started again, elsewhere
    monkeypatch.chdir(tmp_path.parent)
    assert float(vault.counts().sum()) == 60


def test_images_that_cannot_be_decoded(shards: Path, digits: ImageSet) -> None:
    path = shards / "w-002.tar"
    content = path.read_bytes()
    at = content.index(b"IDAT")
    path.write_bytes(content[:at] + b"broken" + content[at + 6 :])
    with pytest.raises(DataError, match=r"w-002\.tar: .*00000\.png"):
        open_shards(shards, classes=10)
    with pytest.warns(sf.data.DataWarning, match="1 files cannot be read"):
        images = open_shards(shards, classes=10, on_error="skip")
    assert len(images) == 59


def test_rows_in_a_file() -> None:
    rows = FileRows((2,), "float32")
    rows.write(3, torch.tensor([[1.0, 2.0]]).numpy())
    rows.write(0, torch.tensor([[5.0, 6.0]]).numpy())
    assert rows.shape == (4, 2)
    assert rows[torch.tensor([[3, 0], [1, 3]])].tolist() == [[[1, 2], [5, 6]], [[0, 0], [1, 2]]]
    assert rows[torch.tensor([2, 3])].tolist() == [[0, 0], [1, 2]]


def test_test_images_among_the_private_ones_are_found(shards: Path, digits: ImageSet) -> None:
    from sfumato.synthesize import check_disjoint

    images = open_shards(shards, classes=10)
    others = sf.load_images("digits", split="test")
    assert images.contains(others) == []
    mixed = ImageSet(torch.cat([others.images[:3], digits.images[50:51]]))
    assert images.contains(mixed) == [3]
    with pytest.raises(DataError, match="contain a private image"):
        check_disjoint(images, mixed)


def test_several_frames_need_persons_on_shards(shards: Path, digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 300 pages of one patient's file would otherwise count as a unit."""
    pages = io.BytesIO()
    first, *others = (Image.fromarray(each[0].numpy()) for each in digits.images[:5])
    first.save(pages, "TIFF", save_all=True, append_images=others)
    facts = json.dumps({"label": 0, "person": "p0"}).encode()
    with tarfile.open(shards / "w-000.tar", "w") as archive:
        for name, data in (("0.tiff", pages.getvalue()), ("0.json", facts)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    with pytest.raises(DataError, match=r"frames='all' .* pass person="):
        open_shards(shards, classes=10, frames="all")
    images = open_shards(shards, classes=10, frames="all", person="person")
    assert len(images) == 45
    entry = images.entries[0]
    listing, _ = entry.shard.read(entry.reading, None)
    monkeypatch.setattr(type(entry.shard), "read", lambda *_: (replace(listing, persons=None), "hash"))
    with pytest.raises(DataError, match=r"w-000\.tar holds several images of one person"):
        decode_shard(entry.shard, entry.reading, "raise")


def test_a_manifest_is_private(shards: Path, tmp_path: Path) -> None:
    with open_shards(shards, classes=10, manifest=tmp_path / "run" / "m.json") as images:
        assert (tmp_path / "run" / "m.json").stat().st_mode & 0o777 == 0o600
        with pytest.raises(DataError, match=r"the manifest .* would lie in .* Choose another place"):
            sf.create("dp-merf", epsilon=5.0).fit(images, run_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    target = tmp_path / "out"
    found = CliRunner().invoke(
        cli.app, ["fit", str(shards), "--classes", "10", "--manifest", f"{target}/m.json", "--out", str(target)]
    )
    assert found.exit_code
    assert isinstance(found.exception, DataError)
    assert "would lie in" in str(found.exception)
    assert not (target / "m.json").exists()


def test_a_source_without_shard_files_is_divided_at_random(digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of records are together in 1 of 4 shards by chance, however many records there are before or after."""
    monkeypatch.setattr(shards_module, "SHARDS", 4)

    def numbers(records: int, seed: int) -> torch.Tensor:
        found = torch.full((records,), -1)
        for number, part in enumerate(shards_module._divide(records, seed)):
            found[part] = number
        return found

    for records in (3, 300):
        draws = torch.stack([numbers(records, secrets.randbits(128)) for _ in range(1600)])[:, [0, 1, -1]]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            counts = torch.bincount(4 * draws[:, one] + draws[:, other], minlength=16)
            assert float(((counts - 100.0) ** 2 / 100).sum()) < 60  # chi-squared with 15 degrees of freedom
    assert torch.equal(numbers(301, 7)[:300], numbers(300, 7))
    assert not torch.equal(numbers(300, 7), numbers(300, 8))
    for some in (digits, digits.subset([0, 1])):  # as many shards, whatever the images
        assert [shard.name for shard in split_images(some, 7)] == [f"images [{number}]" for number in range(4)]
    persons = torch.tensor([4, 4, 9])
    few = open_shards(ImageSet(digits.images[:3], digits.labels[:3], digits.classes, persons=persons))  # type: ignore[index]
    assert few.persons is not None
    assert sorted(torch.bincount(few.persons).tolist()) == [1, 2]
    assert len({line.sha256 for line in few.manifest()}) == 4
    mapped = vault_of(few, "person").map(pixels)
    assert float(mapped.sum(lambda rows: rows[:, :1] * 0 + 1, release="sum", bound=1.0)) == pytest.approx(2, abs=1e-3)


def test_a_divided_source_is_found_again_by_its_manifest(digits: ImageSet, tmp_path: Path) -> None:
    save_images(digits, tmp_path / "folders")
    options = {"mode": "grey", "manifest": tmp_path / "m.json"}
    first = open_shards(tmp_path / "folders", **options)  # type: ignore[arg-type]
    assert open_shards(tmp_path / "folders", **options).manifest() == first.manifest()  # type: ignore[arg-type]
    private = next(iter(tmp_path.glob("folders/*/*.png")))
    vault, content = vault_of(first), private.read_bytes()
    first.executor.close()
    private.unlink()
    with pytest.raises(DataError, match=r"cannot be read.*Nothing was released") as caught:
        vault.counts()
    assert private.name not in str(caught.value)  # after the first release, a message names the shard only
    private.write_bytes(content[:50])
    with pytest.raises(DataError, match="was changed since"):
        open_shards(tmp_path / "folders", **options)  # type: ignore[arg-type]
    with pytest.warns(sf.data.DataWarning, match="1 files cannot be read"):  # also if its shard is then empty
        assert len(open_shards(tmp_path / "folders", mode="grey", on_error="skip")) == 59


def test_nothing_of_a_shard_stays_in_memory(tmp_path: Path) -> None:
    """Each shard leaves at most 16 bytes per image, garbage or not, and no tensor, which would split the heap."""
    many = load_images("digits").subset(range(1000))
    for number in range(12):
        write_tar(tmp_path / f"w-{number:03}.tar", many, [f"{number}" for _ in range(1000)])
    kept: list[int] = []
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        images = open_shards(tmp_path, classes=10, progress=lambda *_: kept.append(tracemalloc.get_traced_memory()[0]))
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and len(each.shape) == 1]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert min(kept[-3:]) - min(kept[:3]) < 9 * 16_000 < (tmp_path / "w-000.tar").stat().st_size
    assert not [each for each in tensors if each.shape == (1000,) and each is not many.labels]
    assert images.outline.labels is not None
    assert torch.equal(images.outline.labels[-1000:], many.labels)  # type: ignore[arg-type]
