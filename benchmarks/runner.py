"""Run the jobs of a table: worker processes, rows kept as they come, resumable.

The generic job fits a method, draws images and measures them. A row belongs to a job by its job name, method, data,
epsilon, sample and seed; parameters are recorded but not compared. To run a job again, delete its rows.

Times are in seconds; on a CPU also those of the processor, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import multiprocessing
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import sfumato as sf
from benchmarks.measures import Fitted, key_of, measure
from benchmarks.store import ROOT, Row, append, load, number
from sfumato.data import ImageSet, contact_sheet
from sfumato.data.named import named_sets

MAX_IMAGES = 60_000  # generated

Sets = tuple[ImageSet, ImageSet]
Wanted = dict[str | None, tuple[str, ...]]  # measures by the name of the sample


@dataclass(frozen=True)
class Sample:
    """A way to draw from a fitted model.

    - options: parameters of the method that change after the fit.
    - images: number of images; default: that of the job.
    - measures: default: those of the job.
    - seeds: number of seeds.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    images: int | None = None
    measures: tuple[str, ...] | None = None
    seeds: int = 1


@dataclass(frozen=True)
class Job:
    """One fit for each seed.

    - name: of the job in the table.
    - method: its key; None measures the training images themselves.
    - data: a named data set, or NAME.npz in the folder of the data.
    - epsilon: the budget; None leaves the method's default.
    - params: parameters of the method. constants: its named constants (`with_constants`).
    - measures: what is measured, see `measures.py`.
    - first: what is measured of seed 0 only.
    - samples: further ways to draw from the same fit, by name.
    - images: number of generated images; default: as many as there are training images, at most 60,000.
    - device, threads: in place of those of the command.
    - prepare: changes training and test images.
    - draw: takes the place of fit and sampling: returns images from the program of others.
    - run: takes the place of the generic job; returns what was measured by row name, for the names in `produces`.
    """

    name: str
    method: str | None
    data: str
    epsilon: float | None = 1.0
    params: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    measures: tuple[str, ...] = ("small_cnn",)
    first: tuple[str, ...] = ()
    samples: Mapping[str, Sample] = field(default_factory=dict)
    seeds: int = 3
    images: int | None = None
    device: str | None = None
    threads: int | None = None
    prepare: Callable[[ImageSet, ImageSet], Sets] | None = None
    draw: Callable[[Job, int, argparse.Namespace, ImageSet, ImageSet], ImageSet] | None = None
    run: Callable[[Job, int, argparse.Namespace], dict[str, dict[str, Any]]] | None = None
    produces: tuple[str, ...] = ()

    def identity(self, seed: int, sample: str | None, name: str | None = None) -> tuple[Any, ...]:
        return (name or self.name, self.method, self.data, number(self.epsilon), sample, seed)

    def wanted(self, seed: int) -> Wanted:
        """Return all measures of a seed."""
        found: Wanted = {None: (*self.measures, *(() if seed else self.first))} if seed < self.seeds else {}
        return found | {n: s.measures or self.measures for n, s in self.samples.items() if seed < s.seeds}


def jobs(
    name: str, method: str | None, data: Iterable[str], epsilons: Iterable[float | None], **more: Any
) -> list[Job]:
    """Return a job for each data set and epsilon. Values of `more` may be functions of the data set's name."""
    found = []
    for epsilon in epsilons:
        for one in data:
            given = {
                key: value(one) if key in ("params", "constants") and callable(value) else value
                for key, value in more.items()
            }
            found.append(Job(name, method, one, epsilon, **given))
    return found


def module_of(table: str) -> Any:
    """Return the module of a table: `benchmarks/tables/`, or `benchmarks/speed/` for names that begin with speed-."""
    kind, name = ("speed", table.removeprefix("speed-")) if table.startswith("speed-") else ("tables", table)
    return importlib.import_module(f"benchmarks.{kind}.{name.replace('-', '_')}")


def missing(table: list[Job], rows: list[Row], seeds: int) -> list[tuple[Job, int, Wanted]]:
    """Return the jobs and seeds that have something left to measure, and what."""
    have: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        fields = (row["job"], row["method"], row["data"], row["epsilon"], row.get("sample"), row["seed"])
        have.setdefault(fields, set()).update(row["measured"])
    found = []
    for seed in range(seeds):
        for job in table:
            if job.run is not None:
                left: Wanted = {None: ()} if seed < job.seeds else {}
                if left and all(job.identity(seed, None, name) in have for name in job.produces or (job.name,)):
                    left = {}
            else:
                left = {}
                for sample, names in job.wanted(seed).items():
                    measured = have.get(job.identity(seed, sample), set())
                    if names := tuple(name for name in names if key_of(name) not in measured):
                        left[sample] = names
            if left:
                found.append((job, seed, left))
    return found


def only(wanted: Wanted, names: list[str]) -> Wanted:
    """Return the part of `wanted` that is among the names of measures; all of it without names."""
    if not names:
        return wanted
    return {sample: kept for sample, some in wanted.items() if (kept := tuple(name for name in some if name in names))}


def source_of(data: str, folder: Path) -> str:
    """Return a known data set by its name, which also gives its classes; any other by its file in the folder."""
    known = data in {each.name for each in named_sets()}
    return data if known or not (folder / f"{data}.npz").exists() else str(folder / f"{data}.npz")


def load_sets(job: Job, folder: Path) -> Sets:
    """Return training and test images."""
    source = source_of(job.data, folder)
    sets = sf.load_images(source), sf.load_images(source, split="test")
    return job.prepare(*sets) if job.prepare else sets


def execute(job: Job, seed: int, wanted: Wanted, options: argparse.Namespace) -> list[Row]:
    """Run one job and return its rows."""
    plain = {name: _plain(value) for name, value in {**job.params, **job.constants}.items()}
    about = {"method": job.method, "data": job.data, "epsilon": number(job.epsilon), "params": plain}
    if job.run is not None:
        measured = job.run(job, seed, options)
        return [{"job": name, **about, "seed": seed, "measured": values} for name, values in measured.items()]
    images, test = load_sets(job, options.folder)
    model, facts, synthetic = None, {}, images
    if job.draw is not None:
        started = time.perf_counter()
        synthetic = job.draw(job, seed, options, images, test)
        facts["fit_s"] = round(time.perf_counter() - started, 1)
    if job.method is not None:
        budget = {} if job.epsilon is None else {"epsilon": job.epsilon}
        device = job.device or options.device
        model = sf.create(job.method, **{"seed": seed, "device": device, **budget, **job.params})
        model.with_constants(**job.constants)
        if model.torch_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.process_time()
        seconds = timed(lambda: model.fit(images))
        certificate = model.certificate_
        facts["certified"] = None if certificate.epsilon is None else round(certificate.epsilon, 4)
        facts["noise_multiplier"] = [round(event["noise_multiplier"], 4) for event in certificate.events]
        facts["fit_s"] = round(seconds, 1)
        if model.torch_device.type == "cpu":
            facts["fit_processor_s"] = round(time.process_time() - started, 1)
        if model.torch_device.type == "cuda":
            facts["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    rows = []
    for name, names in wanted.items():
        fitted = Fitted(model, images, test, synthetic, seed, job.data, options.device)
        sample, drawn = job.samples.get(name, Sample()) if name else Sample(), {}
        if model is not None:
            count = min(sample.images or job.images or min(MAX_IMAGES, len(images)), _limit(model, images))
            changed = {key: getattr(model, key) for key in sample.options if key not in model.adjustable}
            for key in changed:
                setattr(model, key, sample.options[key])
            given = {key: value for key, value in sample.options.items() if key in model.adjustable}
            started = time.process_time()
            seconds = timed(lambda: setattr(fitted, "synthetic", model.sample(count, seed=seed, **given)))  # noqa: B023
            fitted.sample_s, drawn = seconds, {"images": count, "sample_s": round(seconds, 1)}
            if model.torch_device.type == "cpu":
                drawn["sample_processor_s"] = round(time.process_time() - started, 1)
        if options.pictures and seed == 0 and fitted.synthetic is not images:
            parts = [job.name, job.method or "", job.data, f"{job.epsilon}", name or ""]
            title = "_".join(filter(None, parts)).replace(" ", "-").replace(",", "")
            contact_sheet(fitted.synthetic, options.pictures / f"{title}.png")
        measured = {key: value for one in names for key, value in measure(one, fitted).items()}
        if model is not None:
            for key, value in changed.items():
                setattr(model, key, value)
        about_sample = {"sample": name} if name else {}
        rows.append({"job": job.name, **about, **about_sample, "seed": seed, "measured": measured, **facts, **drawn})
    return rows


def run(table: str, options: argparse.Namespace) -> bool:
    """Run what is missing of a table; return whether all jobs succeeded."""
    todo = [
        (job, seed, left)
        for job, seed, wanted in missing(module_of(table).JOBS, load(table, options.results)["rows"], options.seeds)
        if _chosen(job, options) and (left := only(wanted, options.measure))
    ]
    head = about_run(f"python -m benchmarks {table}", options)
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    waiting, done = context.Queue(), context.Queue()
    workers = min(options.workers, len(todo))
    for item in [*todo, *[None] * workers]:
        waiting.put(item)
    deadline = time.time() + options.seconds
    for _ in range(workers):
        context.Process(target=_work, args=(waiting, done, options, deadline), daemon=True).start()
    fine = True
    while workers:
        made = done.get()
        if made is None:
            workers -= 1
        elif isinstance(made, str):
            fine = False
            print(made, flush=True)
        else:
            append(table, made, head, options.results)
            for row in made:
                print(table, *(row[key] for key in ("job", "data", "epsilon", "seed", "measured")), flush=True)
    return fine


def _work(waiting: Any, done: Any, options: argparse.Namespace, deadline: float) -> None:
    while (item := waiting.get()) is not None and time.time() < deadline:
        torch.set_num_threads(item[0].threads or options.threads)
        try:
            done.put(execute(*item, options))
        except Exception:  # the other jobs go on
            done.put(f"failed: {item[0].name}, {item[0].data}, seed {item[1]}\n{traceback.format_exc()}")
    done.put(None)


def about_run(command: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return command, commit, device and versions. Paths of this machine stay out."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    quiet = [*git, "diff", "--quiet", "HEAD", "--", "sfumato", "benchmarks/*.py"]
    changed = found and subprocess.run(quiet, check=False).returncode
    versions = {"python": platform.python_version(), "sfumato": sf.__version__}
    return {
        "command": command,
        "commit": f"{found}-dirty" if found and changed else found or None,
        "device": device_name(options.device),
        "versions": {**versions, **{name: version(name) for name in ("torch", "numpy")}},
    }


def device_name(device: str) -> str:
    on_gpu = torch.cuda.is_available() and device != "cpu"
    return torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, CPU"


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that the work takes, on a GPU until it is done."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _limit(model: Any, images: ImageSet) -> float:
    """Return how many images a model can draw: a condensed set is finite."""
    return model.max_samples(model.public_facts(images)) or math.inf


def _chosen(job: Job, options: argparse.Namespace) -> bool:
    by_data = not options.data or job.data in options.data
    by_epsilon = not options.epsilon or job.epsilon in options.epsilon
    by_method = not options.method or job.method in options.method
    return by_data and by_epsilon and by_method and (not options.job or job.name in options.job)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
