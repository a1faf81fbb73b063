"""The declared jobs are valid, identified by their rows, and resumed; none is run here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

import sfumato as sf
from benchmarks.__main__ import tables
from benchmarks.runner import Job, Sample, missing, module_of, only, source_of
from benchmarks.store import append, load, merge, values

TABLES = [name for name in tables() if not name.startswith("speed-")]
HEAD = {"command": "c", "commit": "a", "device": "d", "versions": {}}


@pytest.mark.parametrize("name", TABLES)
def test_jobs_have_parameters_that_exist(name: str) -> None:
    for job in module_of(name).JOBS:
        if job.method is not None:
            model = sf.create(job.method, **{"device": "cpu", **job.params}).with_constants(**job.constants)
            for sample in job.samples.values():
                assert all(hasattr(model, option) for option in sample.options)


@pytest.mark.parametrize("name", TABLES)
def test_jobs_are_told_apart(name: str) -> None:
    jobs = module_of(name).JOBS
    assert len({job.identity(0, None) for job in jobs}) == len(jobs)


@pytest.mark.parametrize("name", [name for name in tables() if name.startswith("speed-")])
def test_speed_benchmarks_import(name: str) -> None:
    assert callable(module_of(name).run)


def row(job: Job, seed: int, sample: str | None = None, **measured: float) -> dict[str, Any]:
    name, method, data, epsilon, *_ = job.identity(seed, sample)
    found = {"job": name, "method": method, "data": data, "epsilon": epsilon, "params": {}, "seed": seed}
    return {**found, "measured": measured, **({"sample": sample} if sample else {})}


def test_only_what_is_missing_is_run() -> None:
    job = Job("default", "dp-merf", "digits", measures=("small_cnn", "fidelity"), samples={"more": Sample()}, seeds=2)
    assert missing([job], [], 3) == [
        (job, 0, {None: ("small_cnn", "fidelity"), "more": ("small_cnn", "fidelity")}),
        (job, 1, {None: ("small_cnn", "fidelity")}),
    ]
    rows = [row(job, 0, small_cnn=1.0), row(job, 1, small_cnn=1.0, fd_effnet_lite0=2.0)]
    assert missing([job], rows, 3) == [(job, 0, {None: ("fidelity",), "more": ("small_cnn", "fidelity")})]


def test_rows_are_added_and_know_where_they_differ(tmp_path: Path) -> None:
    job = Job("default", "dp-merf", "digits")
    append("t", [row(job, 0, small_cnn=90.0)], HEAD, tmp_path)
    append("t", [row(job, 1, small_cnn=92.0)], {**HEAD, "device": "other"}, tmp_path)
    content = load("t", tmp_path)
    assert content["seeds"] == [0, 1]
    assert [one.get("device", content["device"]) for one in content["rows"]] == ["d", "other"]
    assert values(content["rows"], "small_cnn", job="default", data="digits") == [90.0, 92.0]


def test_a_seed_counts_once() -> None:
    job = Job("default", "dp-merf", "digits")
    with pytest.raises(ValueError, match="two rows of one seed"):
        values([row(job, 0, small_cnn=90.0), row(job, 0, small_cnn=95.0)], "small_cnn", job="default")


def test_a_method_is_fitted_and_measured_by_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the generic job with a method and a measure that do nothing."""
    from benchmarks import runner

    class Model:
        adjustable, torch_device = frozenset({"soft"}), argparse.Namespace(type="cpu")
        certificate_ = argparse.Namespace(epsilon=1.0, events=[{"noise_multiplier": 2.0}])

        def with_constants(self, **constants: Any) -> None:
            self.constants = constants

        def fit(self, images: Any) -> None:
            self.fitted = images

        def sample(self, count: int, **options: Any) -> tuple[int, dict[str, Any]]:
            return count, options

        def public_facts(self, images: Any) -> None: ...

        def max_samples(self, public: Any) -> int | None: ...

    monkeypatch.setattr(runner.sf, "create", lambda *_, **__: Model())
    monkeypatch.setattr(runner, "load_sets", lambda *_: ([0] * 7, [0]))
    monkeypatch.setattr(runner, "measure", lambda name, fitted: {name: fitted.synthetic})
    job = Job("default", "dp-merf", "digits", samples={"soft": Sample({"soft": True}, images=3)})
    options = argparse.Namespace(folder=Path(), device="cpu", pictures=None)
    first, second = runner.execute(job, 0, job.wanted(0), options)
    assert first["measured"] == {"small_cnn": (7, {"seed": 0})}
    assert second["measured"] == {"small_cnn": (3, {"seed": 0, "soft": True})}
    assert (first["certified"], first["noise_multiplier"], second["sample"]) == (1.0, [2.0], "soft")


def test_only_chosen_measures_are_run() -> None:
    wanted = {None: ("small_cnn", "fidelity", "dpimagebench@20"), "more": ("small_cnn",)}
    assert only(wanted, []) == wanted
    assert only(wanted, ["fidelity", "fid"]) == {None: ("fidelity",)}
    assert only(wanted, ["fid"]) == {}  # nothing is fitted


def test_rows_of_another_machine_are_added_once(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    job = Job("default", "dp-merf", "digits")
    append("t", [row(job, 0, small_cnn=90.0)], HEAD, here)
    append("t", [row(job, 0, small_cnn=91.0), row(job, 0, fid=5.0), row(job, 1, small_cnn=92.0)], HEAD, there / "a")
    append("u", [row(job, 0, fid=6.0)], {**HEAD, "device": "other"}, there / "b")
    assert merge(there, here) == ["t", "u"]
    assert merge(there, here) == []
    rows = load("t", here)["rows"]
    assert values(rows, "small_cnn", job="default") == [90.0, 92.0]  # what is there stays
    assert values(rows, "fid", job="default") == [5.0]
    other = load("u", here)
    assert (other["device"], len(other["rows"])) == ("other", 1)


def test_speeds_of_two_devices_are_two_rows(tmp_path: Path) -> None:
    for device in ("a", "b"):
        speed = {"job": "features", "device": device, "measured": {"seconds": 1.0}}
        append("speed-t", [speed], {**HEAD, "device": device}, tmp_path / device)
        merge(tmp_path / device, tmp_path / "all")
    assert [each["device"] for each in load("speed-t", tmp_path / "all")["rows"]] == ["a", "b"]


def test_rows_that_are_there_are_not_added_again(tmp_path: Path) -> None:
    """Also rows of the audit, which have no field `measured`."""
    rows: list[dict[str, Any]] = [{"job": "a", "seed": 0, "bound": 1.0}, {"job": "b", "seed": 0, "bound": 2.0}]
    append("audit", rows[:1], HEAD, tmp_path / "own")
    append("audit", rows, HEAD, tmp_path / "other")
    assert merge(tmp_path / "other", tmp_path / "own") == ["audit"]
    assert load("audit", tmp_path / "own")["rows"] == rows
    assert merge(tmp_path / "other", tmp_path / "own") == []


def test_a_known_data_set_is_loaded_by_name_even_if_the_folder_has_a_file_of_it(tmp_path: Path) -> None:
    for name in ("digits", "faces"):
        (tmp_path / f"{name}.npz").touch()
    assert source_of("digits", tmp_path) == "digits"  # the file need not declare the classes
    assert source_of("faces", tmp_path) == str(tmp_path / "faces.npz")
    assert source_of("scans", tmp_path) == "scans"
