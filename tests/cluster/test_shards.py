"""Sharded sources: how they are named, what is refused, and that they are the images that `load_images` reads."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

import sfumato as sf
from sfumato.cluster import ShardedImages, open_shards
from sfumato.data import DataError, ImageSet, save_images
from sfumato.data.storage import FileRows
from tests.cluster.conftest import pixels, vault_of, write_tar

pytestmark = pytest.mark.filterwarnings("ignore:.*holds fewer than:sfumato.data.DataWarning")


def whole(images: ShardedImages) -> torch.Tensor:
    """Return all pixels of an image set in this process, in the order of the manifest."""
    held = images.executor._worker._held  # type: ignore[attr-defined]
    parts = [held[entry.owner, entry.number].decoded.pixels for entry in images.entries]
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
    from sfumato.data.objects import to_hugging_face

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
    with pytest.raises(DataError, match=r"was changed since it was first read|is not a readable"):
        open_shards(shards, classes=10, manifest=manifest)
    shard.unlink()
    with pytest.raises(DataError, match=r"w-001\.tar is missing"):
        open_shards(shards, classes=10, manifest=manifest)
    shard.write_bytes(content)
    shutil.copy(shard, shards / "w-009.tar")
    with pytest.raises(DataError, match=r"w-009\.tar is not in the manifest"):
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
    path.unlink()
    with pytest.raises(DataError, match=r"w-001\.tar cannot be read"):
        vault.sum(pixels, release="sum", bound=1.0)
    assert vault.ledger.void is None
    assert [entry["name"] for entry in vault.ledger.entries[1:]] == ["counts", "sum"]


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
