"""One budget for a data set over many runs: each run reserves its plan here before it starts.

**Why the sum is a guarantee.** People choose later runs after they saw earlier results, so accountants for parameters
fixed in advance do not apply. A Renyi filter does (Feldman and Zrnic 2021; Lecuyer 2021). Fix an order a when the
account is opened. Take the releases of all runs in the order in which they are drawn, also where runs overlap. What the
t-th one is, and so its divergence r_t of order a, may depend on all earlier ones. If always r_1 + r_2 + ... <= B, then
all together have divergence at most B: the product over t of (likelihood ratio)^a exp(-(a-1) r_t) is a supermartingale
that starts at 1. A plan reserves the sum of its r_t before its first release, so what was drawn is at most what is
reserved, which is kept at most B = epsilon - log(1 - 1/a) + log(delta a) / (a - 1). That implies (epsilon, delta)
(Canonne, Kamath and Steinke 2020). a depends on (epsilon, delta) alone: it is the one that admits most Gaussian sums.

One exception: the *first* run may be accepted because its own `bounds` are at most epsilon. It was fixed before
anything was released. If its divergence is above B, nothing else is ever accepted and `bounds` covers what there is;
if not, the filter covers all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import dp_accounting
import numpy as np
from dp_accounting import rdp

from sfumato.privacy.accounting import Plan, Release, bounds, least, merged, quiet
from sfumato.privacy.budget import Adjacency, Budget, BudgetExceeded, Unit
from sfumato.privacy.ledger import Ledger, LedgerError

ORDERS = [float(order) for order in range(2, 1001)]  # whole: at others the library's series may not converge
FIELDS = ("name", "times", "sampling_prob", "noise_multiplier", "nonnegative")  # of a release
WAIT = 30.0  # seconds for other processes; nobody holds the account during a run


@dataclass(frozen=True)
class Row:
    """A reserved run, and how the account stands after it.

    epsilon: its own; used: divergence of all runs up to it; total: the least budget (at this order) that admits them;
    left: epsilon of the largest Gaussian sum over all the data that still fits.
    """

    date: str
    run: str
    method: str | None
    epsilon: float
    used: float
    total: float
    left: float


class Account:
    """The budget of a data set, in a ledger of its own; `Account.open` makes one.

    Guarantee: all releases of all runs that were reserved here are together (epsilon, delta)-private, unless `voided`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self._ledger() as ledger:
            line = ledger.entries[0]
        self.budget = Budget(line["epsilon"], line["delta"], line["adjacency"], line["unit"])
        self.epsilon, self.order, self.note = self.budget.epsilon, float(line["order"]), line["note"]

    @classmethod
    def open(
        cls,
        path: str | Path,
        epsilon: float,
        delta: float,
        adjacency: Adjacency = "add-remove",
        unit: Unit = "image",
        note: str | None = None,
    ) -> Account:
        """Make an account. Guarantee: overwrites nothing."""
        budget = Budget(epsilon, delta, adjacency, unit)
        order = max(ORDERS, key=lambda order: _room(budget, order) / order)
        if not (budget.private and _room(budget, order) > 0):
            raise ValueError(f"epsilon {epsilon:g} at delta {delta:g} is too small, or no limit, for several runs")
        with Ledger(path, wait=WAIT) as ledger:
            if ledger.entries:
                raise LedgerError(f"{path} is a ledger already; choose another name")
            ledger.append("account", **asdict(budget), order=order, note=note, date=_now())
        return cls(path)

    def reserve(self, run_id: str, plan: Plan, method: str | None = None) -> None:
        """Charge a run's plan. Guarantee: returns only when it is on the disk; a resumed run pays once."""
        wanted = [{name: getattr(release, name) for name in FIELDS} for release in plan.releases]
        alone = self._alone(plan)
        with self._ledger() as ledger:
            paid = [x["releases"] for x in ledger.entries if x["kind"] == "reserve" and x["run"] == run_id]
            if refusal := self._refusal(ledger, plan, alone, paid=bool(paid)):
                raise BudgetExceeded(refusal)
            if paid and paid != [wanted]:
                raise BudgetExceeded(f"run {run_id} reserved other releases in {self.path.name}; start a new run")
            if not paid:
                ledger.append("reserve", run=run_id, method=method, releases=wanted, epsilon=alone, date=_now())

    def refusal(self, plan: Plan) -> str | None:
        """Say why a plan would be refused, or None. Spends nothing."""
        alone = self._alone(plan)
        with self._ledger() as ledger:
            return self._refusal(ledger, plan, alone, paid=False)

    def void(self, run_id: str, reason: str) -> None:
        """Record that a run lost its guarantee. Guarantee: every later `reserve` is refused."""
        with self._ledger() as ledger:
            ledger.append("void", run=run_id, reason=reason, date=_now())

    def rows(self) -> list[Row]:
        """List the reserved runs, oldest first. The promise is `epsilon`, whatever the totals are."""
        with self._ledger() as ledger:
            return self._rows(ledger)

    @property
    def spent(self) -> float:
        """The least budget that admits all runs so far."""
        return max((row.total for row in self.rows()), default=0.0)

    @property
    def left(self) -> float:
        """Epsilon of about the largest run that still fits."""
        return min((row.left for row in self.rows()), default=self.epsilon)

    @property
    def voided(self) -> str | None:
        """Why nothing is guaranteed any more, if so."""
        with self._ledger() as ledger:
            return _voided(ledger)

    def _ledger(self) -> Ledger:
        if self.path.is_file():
            ledger = Ledger(self.path, wait=WAIT)
            if ledger.entries and ledger.entries[0]["kind"] == "account":
                return ledger
            ledger.close()
        raise LedgerError(f"{self.path} is not the budget of a data set; make one with: sfumato budget open")

    def _alone(self, plan: Plan) -> float:
        return least(bounds(plan.releases, self.budget.delta, self.budget.adjacency))

    def _rows(self, ledger: Ledger) -> list[Row]:
        """Guarantee: `used` is recomputed from the releases."""
        rows: list[Row] = []
        used, room = 0.0, _room(self.budget, self.order)
        for line in (entry for entry in ledger.entries if entry["kind"] == "reserve"):
            used += renyi([Release(**release) for release in line["releases"]], self.order, self.budget.adjacency)
            total = used + self.epsilon - room if rows else min(used + self.epsilon - room, line["epsilon"])
            z = math.sqrt(self.order / 2 / (room - used)) if used < room else 1e9
            left = float(dp_accounting.get_epsilon_gaussian(z, self.budget.delta))
            rows.append(Row(line["date"], line["run"], line["method"], line["epsilon"], used, total, left))
        return rows

    def _refusal(self, ledger: Ledger, plan: Plan, alone: float, *, paid: bool) -> str | None:
        """Guarantee: None only if the module docstring's condition holds with this plan added, or it is paid for."""
        mine, its, name, rows = self.budget, plan.budget, self.path.name, self._rows(ledger)
        if reason := _voided(ledger):
            return f"{name} guarantees nothing any more: {reason}"
        if (its.unit, its.adjacency) != (mine.unit, mine.adjacency):
            one, other = (f"one {budget.unit}, {budget.adjacency}" for budget in (mine, its))
            return f"{name} is a budget for {one}; this run is for {other}, and they do not add up"
        if not math.isfinite(alone):
            return f"a run without noise (epsilon inf) cannot be charged to {name}"
        every = f"{name} allows epsilon {mine.epsilon:g} at delta {mine.delta:g} over all runs"
        if paid or not rows:
            return None if paid or alone <= mine.epsilon else f"{every}; this one needs {alone:.3g}"
        if rows[-1].used + renyi(plan.releases, self.order, mine.adjacency) <= _room(mine, self.order):
            return None
        used = f"{rows[-1].total:.3g} is reserved ({len(rows)} run{'s' * (len(rows) > 1)})"
        return f"{every}; {used}, this one asks for {alone:.3g}, and {rows[-1].left:.3g} is left for one more"


def _room(budget: Budget, order: float) -> float:
    """Return B of the module docstring."""
    return budget.epsilon - math.log1p(-1 / order) + math.log(budget.delta * order) / (order - 1)


def _voided(ledger: Ledger) -> str | None:
    return next((f"{line['reason']} (run {line['run']})" for line in ledger.entries if line["kind"] == "void"), None)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def renyi(releases: Sequence[Release], order: float, adjacency: Adjacency) -> float:
    """Return the composed Renyi divergence of that order. Guarantee: an upper bound, additive over releases.

    Under replace-one with sampling it is the integral of the dominating pair (proof 5 of docs/proofs.md), by the
    trapezoidal rule, which for such an integrand errs by less than 1e-12.
    """
    if any(release.noise == 0 for release in releases):
        return math.inf
    full, sampled = merged(releases, adjacency)
    total = order / (2 * full**2)
    for q, z, times in sampled:
        if adjacency == "add-remove":
            with quiet():
                accountant = rdp.RdpAccountant([order])
                accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), times)
                total += float(accountant.rdp[0])
        else:
            x = np.arange(-2 - 14 * z, 2 * order + 14 * z, z / 64)
            logs = [np.log1p(-q) - x**2 / (2 * z**2), np.log(q) - (x - 1) ** 2 / (2 * z**2)]
            p, other = np.logaddexp(*logs), np.logaddexp(logs[0], np.log(q) - (x + 1) ** 2 / (2 * z**2))
            logs = order * p + (1 - order) * other
            integral = np.log(np.sum(np.exp(logs - logs.max())) / 64 / math.sqrt(2 * math.pi)) + logs.max()
            total += times * max(float(integral), 0.0) / (order - 1)
    return total
