"""The report, the data-set card and Croissant metadata: what they say, and what they must not say."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

import sfumato as sf
from sfumato.certificate import Certificate
from sfumato.data import DataError, ImageSet
from sfumato.data.named import read_digits
from sfumato.privacy.accounting import Release, bounds
from sfumato.report import ReportRun, read_run, write_report
from sfumato.report.card import card, croissant
from sfumato.report.guarantee import attack_success, epsilon_curve, stages
from sfumato.report.page import render
from sfumato.synthesize import synthesize

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 100:sfumato.data.DataWarning")
LOADED = re.compile(r"""<script|<link|\bsrc=["'](?!data:)|url\(|@import|https?://""")
HOSTILE = "<script>alert(1)</script> & [x](http://evil)"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, few_digits: ImageSet) -> Path:
    """A folder that `synthesize` wrote, with hostile names of a class and of the data."""
    folder = tmp_path_factory.mktemp("runs") / "shared"
    names = (HOSTILE, "one", "two", "three")
    images, test = replace(few_digits, classes=names), read_digits("test")
    assert test.labels is not None
    test = test.subset(test.labels < 4)
    test = ImageSet(test.images, test.labels, names)
    model = sf.create("dp-merf", epsilon=500.0, features=60, steps=3, batch_size=20, device="cpu")
    half = len(test) // 2
    synthesize(
        model,
        images,
        folder,
        number=40,
        test=test.subset(range(half)),
        reference=test.subset(range(half, len(test))),
        subject=HOSTILE,
        issuer="a clinic",
    )
    return folder


def certificate(*releases: Release, adjacency: str = "add-remove", delta: float = 1e-5) -> Certificate:
    """Return a certificate with these releases."""
    found = bounds(releases, delta, adjacency)  # type: ignore[arg-type]
    names = ("name", "times", "sampling_prob", "noise_multiplier", "nonnegative")
    events = [{**{name: getattr(each, name) for name in names}, "noise": "fast"} for each in releases]
    return Certificate(
        guarantee="differential-privacy",
        epsilon=min(value for value in found.values() if value is not None),
        delta=delta,
        adjacency=adjacency,
        unit="image",
        caveats=[],
        bounds=found,
        events=events,
        void=None,
        noise={},
        method="dp-merf",
        parameters={"epsilon": 1.0},
        public_facts={"shape": [1, 8, 8], "classes": ["a", "b"], "labelled": True, "sizes": None},
        account=None,
        ledger="0" * 64,
        claimed=None,
        issuer=None,
        subject=None,
        issued="2026-01-01T00:00:00+00:00",
        software={},
    )


# -- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
def test_the_coin_test_is_that_of_the_gaussian(noise: float) -> None:
    """For one Gaussian release of sensitivity 1, the best guess is right with probability Phi(1 / (2 noise))."""
    exact = norm.cdf(1 / (2 * noise))
    found = attack_success(epsilon_curve(certificate(Release("sum", noise_multiplier=noise))))
    assert exact <= found + 1e-12  # never promises too much
    assert found < exact + 0.01


def test_the_coin_test_of_subsampled_releases_is_no_better_than_exact() -> None:
    """The sum over a sample of probability q of one release: the total variation is q times that of the Gaussian."""
    stated = certificate(Release("sum", noise_multiplier=1.0, sampling_prob=0.1))
    exact = 0.5 + 0.1 * (norm.cdf(0.5) - 0.5)
    assert exact <= attack_success(epsilon_curve(stated)) < 0.75


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_the_curve_holds_the_stated_point_and_falls(adjacency: str) -> None:
    stated = certificate(Release("a", 100, 0.05, 1.2), Release("b", 1, 1.0, 9.0), adjacency=adjacency)
    curve = epsilon_curve(stated, [1e-8, 1e-6, 1e-5, 1e-3, 0.1])
    values = [epsilon for _, epsilon in curve]
    assert values == sorted(values, reverse=True)
    assert stated.epsilon is not None
    assert values[2] <= stated.epsilon
    for delta, epsilon in curve[:2]:
        truth = min(v for v in bounds([Release("a", 100, 0.05, 1.2), Release("b", 1, 1.0, 9.0)], delta,
                                      adjacency).values() if v is not None)  # type: ignore[arg-type]  # fmt: skip
        assert truth <= epsilon + 1e-6


def test_shares_of_the_budget_add_up() -> None:
    found = stages(certificate(Release("counts", 1, 1.0, 10.0), Release("steps", 4, 1.0, 10.0)))
    assert [round(stage.share, 6) for stage in found] == [0.2, 0.8]


# -- the folder -------------------------------------------------------------------------------------------


def test_the_certificate_covers_report_and_card(shared: Path, tmp_path: Path) -> None:
    result = sf.verify(shared / "certificate.json")
    assert result.ok, result.problems
    assert {"report.html", "README.md", "croissant.json"} <= set(result.checked)
    shutil.copytree(shared, tmp_path / "copy")
    (tmp_path / "copy" / "report.html").write_text("<p>epsilon 0</p>")
    assert sf.verify(tmp_path / "copy" / "certificate.json").problems == [
        "outputs: report.html is not what was certified"
    ]


def test_the_report_loads_nothing_and_escapes_everything(shared: Path) -> None:
    page = (shared / "report.html").read_text("utf-8")
    text = re.sub(r"data:image/png;base64,[\w+/=]+", "data:", page).replace("http://evil", "")
    assert not LOADED.search(text)
    assert "default-src 'none'" in page
    assert "&lt;script&gt;alert(1)" in page
    pictures = re.findall(r"<img [^>]*>", page)
    assert len(pictures) == 4
    assert all(re.search(r'alt="\d+ synthetic images of class \S', picture) for picture in pictures)
    assert "(real)" not in page  # test images are shown on request only


def test_the_report_says_what_the_figures_mean(shared: Path) -> None:
    page = (shared / "report.html").read_text("utf-8")
    metrics = json.loads((shared / "metrics.json").read_text("utf-8"))
    stated = Certificate.load(shared / "certificate.json")
    assert f"{metrics['utility']['small_cnn']['mean']:.1f} %" in page
    assert f"{metrics['chance']['accuracy']:.1f} %" in page
    assert f"{metrics['reference']['utility']['small_cnn']['mean']:.1f} %" in page
    assert f"{math.ceil(1000 * attack_success(epsilon_curve(stated))) / 10:.1f} %" in page
    assert "hardly any protection" in page  # epsilon 500
    assert "this report included" in page
    for text in ("Not protected", "Taken as public", "counts", "embedding", "Confusion matrix", "a clinic"):
        assert text in page


def test_nothing_names_private_folders_or_times(tmp_path: Path, few_digits: ImageSet) -> None:
    folder = sf.save_images(few_digits, tmp_path / "secret-ward")
    images = sf.load_images(folder, size=8)
    model = sf.create("dp-merf", epsilon=500.0, features=60, steps=3, batch_size=20, device="cpu")
    synthesize(model, images, tmp_path / "out", number=20)
    for name in ("report.html", "README.md", "croissant.json"):
        text = (tmp_path / "out" / name).read_text("utf-8")
        assert "secret-ward" not in text
        assert str(len(images)) not in re.findall(r"[\d,]+(?= (?:private|real) images)", text)
        assert not re.search(r"\d (?:seconds|minutes|MB|GiB)\b", text)


# -- several runs, bad runs -------------------------------------------------------------------------------


def run(method: str, epsilon: float, accuracy: float) -> ReportRun:
    stated = replace(certificate(Release("a", 1, 1.0, 3.0)), method=method, parameters={"epsilon": epsilon})
    confusion = [[int(accuracy), 100 - int(accuracy)], [10, 90]]
    entry = {"mean": accuracy, "sd": 0.0, "values": [accuracy], "per_class": [], "confusion": confusion}
    return ReportRun(f"{method}-{epsilon}", stated, metrics={"utility": {"small_cnn": entry}})


def test_several_runs_give_curves_with_error_bars() -> None:
    runs = [run("dp-merf", 1.0, 60.0), run("dp-merf", 1.0, 64.0), run("dp-merf", 10.0, 80.0), run("atelier", 1.0, 70.0)]
    page = render(runs)
    assert "62.0 ± 2.8" in page
    assert page.count('class="error"') == 1
    assert page.count("<polyline") == 2
    assert ">chance</text>" in page


def test_a_run_that_was_changed_is_named(shared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(shared, copy)
    content = json.loads((copy / "certificate.json").read_text())
    (copy / "certificate.json").write_text(json.dumps({**content, "epsilon": 0.1}))
    found = read_run(copy)
    assert found.verification is not None
    assert not found.verification.ok
    page = write_report([found], tmp_path / "r.html").read_text()
    assert "this report included" not in page  # no certificate covers a page that was made later
    assert "The certificate does not hold." in page
    with pytest.raises(DataError, match="exists already"):
        write_report([found], tmp_path / "r.html")


@pytest.mark.parametrize(
    ("name", "content"),
    [("certificate.json", "{}"), ("metrics.json", "[1"), ("metrics.json", '{"utility": {"small_cnn": 3}}')],
)
def test_damaged_runs_give_an_error(shared: Path, tmp_path: Path, name: str, content: str) -> None:
    shutil.copytree(shared, tmp_path / "copy")
    (tmp_path / "copy" / name).write_text(content)
    with pytest.raises(DataError, match=r"cannot be shown|unknown form"):
        render([read_run(tmp_path / "copy")])


def test_promises_are_rounded_up() -> None:
    stated = certificate(Release("a", 1, 1.0, 3.0))
    page = render([ReportRun("x", replace(stated, epsilon=1.27101))])
    assert "ε = 1.272," in page
    assert "1 in 100,000" in page


def test_a_run_without_guarantee_says_so() -> None:
    open_run = replace(certificate(Release("a", 1, 1.0, 3.0)), epsilon=None, guarantee="none", void="no noise")
    page = render([ReportRun("open", open_run)])
    assert "nothing is protected" in page
    assert "coin" not in page
    assert "No privacy guarantee" in card(open_run, ImageSet(_pixels()), {})


# -- card and Croissant -----------------------------------------------------------------------------------


def _pixels() -> object:
    return sf.ImageSet.from_arrays(np.zeros((2, 1, 8, 8), np.uint8)).images


def test_the_card_is_read_by_datasets(shared: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset(str(shared), split="train", cache_dir=str(tmp_path))
    assert len(loaded) == 40
    assert sorted(loaded.features["label"].names)[1:] == ["one", "three", "two"]
    yaml = pytest.importorskip("yaml")
    text = (shared / "README.md").read_text("utf-8")
    header = yaml.safe_load(text.split("---")[1])
    stated = Certificate.load(shared / "certificate.json")
    assert header["privacy"]["epsilon"] == stated.epsilon
    assert header["privacy"]["unit"] == "image"
    assert math.isclose(header["privacy"]["delta"], stated.delta)


@pytest.mark.filterwarnings("ignore")  # of the library
def test_croissant_is_valid(shared: Path, few_digits: ImageSet) -> None:
    mlcroissant = pytest.importorskip("mlcroissant")
    found = mlcroissant.Dataset(jsonld=str(shared / "croissant.json"))
    assert found.metadata.ctx.issues.errors == set()
    records = list(found.records(record_set="images"))
    assert len(records) == 40
    assert {record["images/label"].decode() for record in records} >= {"one", "two", "three"}
    assert "images/*.png" in json.dumps(
        croissant(shared, Certificate.load(shared / "certificate.json"), ImageSet(_pixels()))
    )
