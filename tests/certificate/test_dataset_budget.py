"""One budget over many runs: tight, with clear refusals, safe against edits, races and kills."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import rdp

from sfumato.certificate.dataset_budget import ORDERS, DatasetBudget, renyi_divergence
from sfumato.engine import calibrate, epsilon
from sfumato.privacy.accounting import Plan, Release, bounds, tightest
from sfumato.privacy.budget import Adjacency, Budget, BudgetExceeded
from sfumato.privacy.ledger import Ledger, LedgerError


def plan(value: float = 1.0, **budget: str) -> Plan:
    return calibrate([Release("sum")], Budget(value, **budget))  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    DatasetBudget.open(tmp_path / "hospital.budget", 3, 1e-5, note="scans of 2025")
    return tmp_path / "hospital.budget"


def fill(account: DatasetBudget, each: Plan) -> int:
    for number in range(1000):
        try:
            account.reserve(f"run-{number}", each, "dp-merf")
        except BudgetExceeded:
            return number
    raise AssertionError("the budget never refuses")


def test_runs_compose_more_tightly_than_by_addition(path: Path) -> None:
    """Six runs of epsilon 1 fit into epsilon 3; by addition three would, and seven if fixed in advance."""
    account = DatasetBudget(path)
    assert fill(account, plan()) == 6
    z = plan().releases[0].noise
    assert epsilon(noise_multiplier=z, steps=6) < account.spent < 3
    assert epsilon(noise_multiplier=z, steps=8) > 3
    sampled = DatasetBudget.open(path.with_name("sampled.budget"), 3, 1e-5)
    assert fill(sampled, calibrate([Release("steps", 500, 0.02)], Budget(1))) >= 6


def test_admitted_runs_are_within_the_budget(tmp_path: Path) -> None:
    """An independent accountant, with the admitted runs as fixed, finds at most the budget's epsilon."""
    generator, several = random.Random(1), 0
    for number, adjacency in enumerate(("add-remove", "replace-one") * 3):
        relation: Adjacency = adjacency  # type: ignore[assignment]
        total = generator.choice([0.5, 2.0, 8.0])
        account = DatasetBudget.open(tmp_path / f"{number}.budget", total, 1e-5, relation)
        admitted: list[Release] = []
        for run in range(12):
            q = generator.choice([1.0, 0.2, 0.05])
            release = Release("r", generator.choice([50, 400]) if q < 1 else 1, q)
            each = calibrate([release], Budget(total * generator.choice([0.2, 0.35, 0.6]), 1e-5, relation))
            try:
                account.reserve(str(run), each)
                admitted += each.releases
            except BudgetExceeded:
                continue
        several += len(admitted) > 1
        assert tightest(bounds(admitted, 1e-5, relation)) <= total
        assert account.spent <= total
    assert several >= 4  # a first run with little noise may use up all the divergence at the budget's order


def test_the_order_and_maximum_divergence_agree_with_the_conversion(path: Path) -> None:
    account = DatasetBudget(path)
    assert account.order in ORDERS
    z = account.order  # a Gaussian with the maximum divergence has the budget's epsilon by dp_accounting
    max_divergence = 3 - math.log1p(-1 / z) + math.log(1e-5 * z) / (z - 1)
    noise = math.sqrt(z / (2 * max_divergence))
    accountant = rdp.RdpAccountant([z])
    accountant.compose(dp_accounting.GaussianDpEvent(noise))
    assert accountant.get_epsilon(1e-5) == pytest.approx(3, rel=1e-9)


@pytest.mark.parametrize(("q", "z"), [(1.0, 2.0), (0.1, 1.0), (0.01, 0.8), (0.5, 5.0)])
@pytest.mark.parametrize("order", [2.0, 7.0, 32.0])
def test_divergence_agrees_with_an_independent_accountant(q: float, z: float, order: float) -> None:
    release = Release("r", 30, q, z)
    accountant = rdp.RdpAccountant([order])
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), 30)
    assert renyi_divergence([release], order, "add-remove") == pytest.approx(float(accountant.rdp[0]), rel=1e-9)
    for relation in ("add-remove", "replace-one"):
        adjacency: Adjacency = relation  # type: ignore[assignment]
        value = renyi_divergence([release], order, adjacency)
        converted = value + math.log1p(-1 / order) - math.log(1e-5 * order) / (order - 1)
        assert converted >= tightest(bounds([release], 1e-5, adjacency)) * (1 - 1e-6)
    assert renyi_divergence([release], order, "replace-one") >= renyi_divergence([release], order, "add-remove")


def test_the_first_run_may_use_the_whole_budget(path: Path) -> None:
    account = DatasetBudget(path)
    account.reserve("a", plan(3), "ndpdc")
    (row,) = account.rows()
    assert row.method == "ndpdc"
    assert row.epsilon == row.total == pytest.approx(3, rel=1e-3)
    for value in (1e-3, 1.0):
        with pytest.raises(BudgetExceeded, match="is left"):
            account.reserve("b", plan(value))
    with pytest.raises(BudgetExceeded, match=r"needs 3\.1"):
        DatasetBudget.open(path.with_name("other.budget"), 3, 1e-5).reserve("a", plan(3.1))


def test_a_refusal_states_what_is_reserved_needed_and_left(path: Path) -> None:
    account = DatasetBudget(path)
    for run in "abcde":
        account.reserve(run, plan())
    asked = plan(2)
    said = account.refusal(asked)
    assert said is not None
    for part in ("hospital.budget", "epsilon 3", "delta 1e-05", "(5 runs)", "needs 2", "is left for one more"):
        assert part in said
    with pytest.raises(BudgetExceeded) as refused:
        account.reserve("f", asked)
    assert str(refused.value) == said
    assert len(account.rows()) == 5
    assert account.refusal(plan()) is None
    assert account.refusal(plan(account.left * 0.99)) is None
    assert account.refusal(plan(account.left * 1.01)) is not None
    totals = [row.total for row in account.rows()]
    assert totals == sorted(totals)
    assert account.rows()[0].date.endswith("+00:00")


def test_a_resumed_run_is_charged_once(path: Path) -> None:
    account = DatasetBudget(path)
    for _ in range(3):
        account.reserve("a", plan())
    assert len(account.rows()) == 1
    with pytest.raises(BudgetExceeded, match="other releases"):
        account.reserve("a", plan(0.5))
    fill(account, plan())
    account.reserve("a", plan())  # also when nothing else would fit


def test_adjacency_and_unit_must_match_and_noise_is_required(path: Path) -> None:
    account = DatasetBudget(path)
    with pytest.raises(BudgetExceeded, match=r"one image, add-remove.*one person"):
        account.reserve("a", plan(unit="person"))
    with pytest.raises(BudgetExceeded, match="replace-one"):
        account.reserve("a", plan(adjacency="replace-one"))
    with pytest.raises(BudgetExceeded, match="without noise"):
        account.reserve("a", plan(math.inf))
    assert account.spent == 0
    persons = DatasetBudget.open(path.with_name("p.budget"), 3, 1e-5, "replace-one", "person")
    persons.reserve("a", calibrate([Release("r", 50, 0.05)], Budget(1, 1e-5, "replace-one", "person")))
    assert len(persons.rows()) == 1


def test_a_void_run_ends_the_budget(path: Path) -> None:
    account = DatasetBudget(path)
    account.reserve("a", plan())
    account.void("a", "raw images were taken")
    assert "raw images were taken" in str(account.voided)
    for run in "ab":
        with pytest.raises(BudgetExceeded, match=r"nothing any more.*raw images"):
            account.reserve(run, plan(0.1))


def test_budget_files_are_never_overwritten_or_confused_with_others(path: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="already"):
        DatasetBudget.open(path, 10, 1e-5)
    assert DatasetBudget(path).epsilon == 3
    assert DatasetBudget(path).note == "scans of 2025"
    with pytest.raises(LedgerError, match="budget open"):
        DatasetBudget(tmp_path / "absent.budget")
    assert not (tmp_path / "absent.budget").exists()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.append("open", delta=1e-5)
    with pytest.raises(LedgerError, match="not the budget"):
        DatasetBudget(tmp_path / "ledger.jsonl")
    for value, delta in ((math.inf, 1e-5), (1e-4, 1e-5)):
        with pytest.raises(ValueError, match="several runs"):
            DatasetBudget.open(tmp_path / "x.budget", value, delta)
    assert not (tmp_path / "x.budget").exists()


def test_edits_are_detected(path: Path) -> None:
    account = DatasetBudget(path)
    for run in "ab":
        account.reserve(run, plan())
    text = path.read_text()
    edits = [
        text.replace('"epsilon": 3.0', '"epsilon": 9.0'),
        text.replace('"times": 1', '"times": 0', 1),
        "".join(text.splitlines(keepends=True)[:-1]),
        "".join(text.splitlines(keepends=True)[::2]),
    ]
    for edited in edits:
        assert edited != text
        path.write_text(edited)
        with pytest.raises(LedgerError):
            DatasetBudget(path)
        with pytest.raises(LedgerError):
            account.reserve("c", plan())
    path.write_text(text)
    account.reserve("c", plan())


def _race(path: Path, name: int, each: Plan, start: float) -> None:
    time.sleep(max(start - time.time(), 0))
    account = DatasetBudget(path)
    for number in range(3):
        try:
            account.reserve(f"{name}-{number}", each)
        except BudgetExceeded:
            continue


def test_racing_processes_never_exceed_the_budget(path: Path) -> None:
    fork, each = multiprocessing.get_context("fork"), plan()
    workers = [fork.Process(target=_race, args=(path, name, each, time.time() + 0.5)) for name in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()  # no limit: the machine may be busy
        assert worker.exitcode == 0
    rows = DatasetBudget(path).rows()  # reads and checks every line
    assert len(rows) == 6
    assert len({row.run for row in rows}) == 6
    assert DatasetBudget(path).spent <= 3


def test_a_killed_process_loses_no_reservation(tmp_path: Path) -> None:
    """Every confirmed reservation is on disk, and the file is intact, whenever the process is killed."""
    generator, each = random.Random(0), plan(0.01)
    path = tmp_path / "b.budget"
    DatasetBudget.open(path, 3, 1e-5)
    reserved: set[str] = set()
    for life in range(40):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                account = DatasetBudget(path)
                for number in range(200):
                    run = f"{life}-{number}"
                    account.reserve(run, each)
                    os.write(writer, f"{run}\n".encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as report:  # counts confirmations, not seconds: the machine may be busy
            lines = [report.readline() for _ in range(generator.randrange(3))]
            time.sleep(generator.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            reserved |= {line.strip() for line in [*lines, *report] if line.endswith("\n")}
    account = DatasetBudget(path)
    assert len(reserved) > 10
    assert reserved <= {row.run for row in account.rows()}
    for run in sorted(reserved)[:5]:
        account.reserve(run, each)  # resumed: already reserved
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["seq"] for entry in entries] == list(range(len(entries)))
