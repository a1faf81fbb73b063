"""Compare methods: a run for each method, epsilon and seed in its own folder; then a table, a plot and a report.

On private images all runs count together, and are charged to the budget of the data set. A sweep that is started again
continues where it stopped: finished runs are kept, interrupted ones resumed. Several processes or machines can share
one folder and take a part of the runs each (`shard`), or the workers of a cluster do (`executor`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sfumato.certificate import Certificate
from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.certificate.spending import composed_epsilons
from sfumato.cluster.executors import Executor, InProcess
from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.data.atomic import replacing, write_json
from sfumato.methods.base import Synthesizer
from sfumato.methods.checkpoints import started
from sfumato.methods.registry import create, method_type
from sfumato.privacy import BudgetExceeded, LedgerError, Plan, RedactedError
from sfumato.report import read_run, write_report
from sfumato.report.charts import standalone
from sfumato.report.page import comparison
from sfumato.synthesize import check_settings, synthesize


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a method with its parameters, and its folder."""

    method: str
    epsilon: float
    seed: int
    params: dict[str, Any]
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.method}, epsilon {self.epsilon:g}, seed {self.seed}"

    def create(self) -> Synthesizer:
        return create(self.method, epsilon=self.epsilon, seed=self.seed, **self.params)

    @property
    def finished(self) -> bool:
        """Whether the folder is complete: its certificate covers the report, which is written last."""
        path = self.folder / "certificate.json"
        return path.exists() and "report.html" in Certificate.load(path).outputs


@dataclass(frozen=True)
class Cost:
    """What the runs of a sweep cost together: their number, and epsilon of all releases at delta."""

    runs: int
    epsilon: float
    delta: float


def cells(
    folder: Path,
    methods: Sequence[str],
    epsilons: Sequence[float],
    seeds: int,
    common: dict[str, Any],
    params: dict[str, Any],
) -> list[Cell]:
    """Return the runs of a sweep, so that each method and epsilon has a first result early.

    - common: parameters of all methods, such as delta.
    - params: parameters by name, for all methods that have them, or as METHOD.NAME for one.
    """
    chosen = {method: {**common, **_params_of(method, params)} for method in methods}
    unused = [name for name in params if not any(_belongs(name, method) for method in methods)]
    if unused:
        raise ValueError(f"no method of {', '.join(methods)} has a parameter {unused[0]!r}")
    found = [
        Cell(method, epsilon, seed, chosen[method], folder / f"{method}-epsilon{epsilon:g}-seed{seed}")
        for seed in range(seeds)
        for epsilon in epsilons
        for method in methods
    ]
    if len({cell.folder for cell in found}) < len(found):
        raise ValueError("a method or an epsilon is given twice")
    return found


def cost_of(plans: Sequence[Plan]) -> Cost | None:
    """Return what plans cost together; None if one of them gives no guarantee."""
    budget = plans[0].budget
    if not all(plan.budget.private for plan in plans):
        return None
    releases = [release for plan in plans for release in plan.releases]
    return Cost(len(plans), composed_epsilons(releases, budget.adjacency, [budget.delta])[0], budget.delta)


def check_affordable(waiting: Sequence[Cell], public: PublicFacts, budget: Path | None) -> None:
    """Raise `BudgetExceeded` unless all runs that have not started fit into the budget together."""
    if budget is None:
        return
    plans = [cell.create().plan(public) for cell in waiting if not started(cell.folder)]
    if plans and (refusal := DatasetBudget(budget).refusal_of_all(plans)):
        raise BudgetExceeded(refusal)


def run_cells(
    chosen: Sequence[Cell],
    images: ImageSet,
    test: ImageSet,
    *,
    report: Callable[[str], None],
    executor: Executor | None = None,
    **options: Any,
) -> dict[str, str]:
    """Make the runs that are not finished. Return the errors of runs that failed, by name; the others go on.

    - report: is called with a line about each run.
    - executor: where the runs are made (`cluster.connect`), each on one worker, which sees the same folders; default:
      one after the other in this process.
    - options: of `synthesize`, such as number and budget.
    """
    failed: dict[str, str] = {}
    run = partial(_run_cell, images=images, test=test, **options)
    results = (executor or InProcess()).compute(run, [(cell,) for cell in chosen])
    for number, (cell, (line, error)) in enumerate(zip(chosen, results, strict=True), 1):
        report(f"[{number}/{len(chosen)}] {cell.name}: {line}")
        if error is not None:
            failed[cell.name] = error
    return failed


def _run_cell(cell: Cell, *, images: ImageSet, test: ImageSet, **options: Any) -> tuple[str, str | None]:
    """Make a run, unless it is finished. Return a line about it, and its error if it failed.

    A worker that dies is replaced, and the call repeated: the run is then resumed, and nothing is charged twice.
    """
    try:
        model = cell.create()
        if cell.finished:
            certificate = Certificate.load(cell.folder / "certificate.json")
            check_settings(certificate, model, model.public_facts(images), cell.folder)
            return "already there", None
        result = synthesize(model, images, cell.folder, test=test, resume=started(cell.folder), **options)
        return str(result.accuracy if result.accuracy is not None else "done"), None
    except (DataError, BudgetExceeded, LedgerError, RedactedError, ValueError) as error:
        return f"failed: {error}", str(error)


def write_results(all_cells: Sequence[Cell], folder: Path, *, public: bool, cost: Cost | None) -> dict[str, Any]:
    """Write results.json, results.md, plot.svg and report.html of the finished runs. Return the results."""
    done = [cell for cell in all_cells if cell.finished]
    if not done:
        raise DataError(f"{folder} holds no finished run")
    runs = [read_run(cell.folder) for cell in done]
    found = comparison(runs)
    rows = list(_rows(done, [run.accuracy for run in runs]))
    total = None if cost is None else {"runs": cost.runs, "epsilon": cost.epsilon, "delta": cost.delta}
    results = {
        "data": "public" if public else "private",
        "cost": total,
        "missing": len(all_cells) - len(done),
        "rows": rows,
    }
    write_json(folder / "results.json", results)
    _write(folder / "results.md", _markdown(rows))
    if found["chart"] is not None:
        _write(folder / "plot.svg", standalone(found["chart"]))
    write_report(runs, folder / "report.html", overwrite=True)
    return results


def _rows(done: Sequence[Cell], accuracies: Sequence[dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
    """Yield one row for each method and epsilon: mean and standard deviation over seeds."""
    groups: dict[tuple[str, float], list[float]] = {}
    for cell, accuracy in zip(done, accuracies, strict=True):
        groups.setdefault((cell.method, cell.epsilon), []).extend([] if accuracy is None else [accuracy["mean"]])
    for (method, epsilon), values in groups.items():
        mean = statistics.fmean(values) if values else None
        sd = statistics.stdev(values) if len(values) > 1 else None
        yield {"method": method, "epsilon": epsilon, "accuracy": mean, "sd": sd, "seeds": len(values)}


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    epsilons = sorted({row["epsilon"] for row in rows})
    cell = {(row["method"], row["epsilon"]): _accuracy(row) for row in rows}
    lines = ["| method | " + " | ".join(f"ε = {epsilon:g}" for epsilon in epsilons) + " |"]
    lines.append("|---" * (len(epsilons) + 1) + "|")
    for method in dict.fromkeys(row["method"] for row in rows):
        lines.append(f"| {method} | " + " | ".join(cell.get((method, epsilon), "") for epsilon in epsilons) + " |")
    note = (
        "Accuracy in % of a small CNN that was trained on synthetic images, on the test images; mean ± sd over seeds."
    )
    return "\n".join([*lines, "", note, ""])


def _accuracy(row: dict[str, Any]) -> str:
    if row["accuracy"] is None:
        return "–"
    return f"{row['accuracy']:.1f}" + (f" ± {row['sd']:.1f}" if row["sd"] is not None else "")


def _write(path: Path, text: str) -> None:
    with replacing(path, overwrite=True) as temporary:
        temporary.write_text(text, "utf-8")


def _belongs(name: str, method: str) -> bool:
    owner, dot, parameter = name.rpartition(".")
    return (not dot or owner == method) and parameter in method_type(method)().get_params()


def _params_of(method: str, params: dict[str, Any]) -> dict[str, Any]:
    own = {
        name.rpartition(".")[2]: value for name, value in params.items() if "." not in name and _belongs(name, method)
    }
    return own | {name.rpartition(".")[2]: value for name, value in params.items() if name.startswith(f"{method}.")}
