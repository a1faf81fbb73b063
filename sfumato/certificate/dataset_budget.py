"""One budget for a data set over many runs. Each run reserves its plan here before it starts.

Formal guarantees: people choose later runs after they saw earlier results, so accountants for parameters fixed in
advance do not apply. A Renyi filter does (Feldman and Zrnic 2021; Lecuyer 2021). Fix an order a when the budget is
opened. Take the releases of all runs in the order in which they are drawn, also where runs overlap. The t-th release,
and so its Renyi divergence r_t of order a, may depend on all earlier results. If r_1 + r_2 + ... <= B always holds,
all releases together have a divergence of at most B: the product over t of (likelihood ratio)^a exp(-(a-1) r_t) is a
supermartingale that starts at 1. A plan reserves the sum of its r_t before its first release, so the releases drawn
never exceed the sum reserved, which is kept at most B = epsilon - log(1 - 1/a) + log(delta a) / (a - 1). This implies
(epsilon, delta) (Canonne, Kamath and Steinke 2020). The order a depends on (epsilon, delta) alone: it is the one that
admits the most Gaussian releases.

One exception: the *first* run is accepted if its own `bounds` are at most epsilon, since it was fixed before
anything was released. If its divergence exceeds B, no other run is ever accepted, and `bounds` covers all releases;
otherwise the filter covers all releases.
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

from sfumato.privacy.accounting import Plan, Release, bounds, merge_gaussians, suppress_library_warnings, tightest
from sfumato.privacy.budget import Adjacency, Budget, BudgetExceeded, Unit
from sfumato.privacy.ledger import Ledger, LedgerError

ORDERS = [float(order) for order in range(2, 1001)]  # integers: for others the library's series may not converge
RELEASE_FIELDS = ("name", "times", "sampling_prob", "noise_multiplier", "nonnegative")
LOCK_TIMEOUT = 30.0  # seconds; a process holds the lock only while it reads or writes, not during a run


@dataclass(frozen=True)
class ReservedRun:
    """A reserved run and the state of the budget after it.

    - date, run, method: when it was reserved, its identifier, the method's name.
    - epsilon: of this run alone.
    - used: Renyi divergence of all runs up to this one.
    - total: the smallest epsilon, at this order, that admits all runs up to this one.
    - left: epsilon of the largest Gaussian release without subsampling that still fits.
    """

    date: str
    run: str
    method: str | None
    epsilon: float
    used: float
    total: float
    left: float


class DatasetBudget:
    """The budget of a data set, stored in a ledger file. `DatasetBudget.open` creates one.

    - path: the ledger file.

    Guarantee: all releases of all runs reserved here are together (epsilon, delta)-differentially private, unless
    `voided`.
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
    ) -> DatasetBudget:
        """Create a budget file.

        - path: new file.
        - epsilon, delta, adjacency, unit: see `privacy.Budget`; epsilon must be finite.
        - note: free text that is stored and printed, default None.

        Guarantee: never overwrites a file.
        """
        budget = Budget(epsilon, delta, adjacency, unit)
        order = max(ORDERS, key=lambda order: _max_divergence(budget, order) / order)
        if not (budget.private and _max_divergence(budget, order) > 0):
            raise ValueError(f"epsilon {epsilon:g} at delta {delta:g} is too small, or infinite, for several runs")
        with Ledger(path, wait=LOCK_TIMEOUT) as ledger:
            if ledger.entries:
                raise LedgerError(f"{path} is already a ledger; choose another name")
            ledger.append("account", **asdict(budget), order=order, note=note, date=_now())
        return cls(path)

    def reserve(self, run_id: str, plan: Plan, method: str | None = None) -> None:
        """Charge the plan of a run. Guarantee: on disk when this returns, and only once for a resumed run."""
        wanted = [{name: getattr(release, name) for name in RELEASE_FIELDS} for release in plan.releases]
        own_epsilon = self._own_epsilon(plan)
        with self._ledger() as ledger:
            reserved = [x["releases"] for x in ledger.entries if x["kind"] == "reserve" and x["run"] == run_id]
            if refusal := self._refusal(ledger, plan, own_epsilon, reserved=bool(reserved)):
                raise BudgetExceeded(refusal)
            if reserved and reserved != [wanted]:
                raise BudgetExceeded(f"run {run_id} has reserved other releases in {self.path.name}; start a new run")
            if not reserved:
                ledger.append("reserve", run=run_id, method=method, releases=wanted, epsilon=own_epsilon, date=_now())

    def refusal(self, plan: Plan) -> str | None:
        """Return why a plan would be refused, or None. Spends nothing."""
        own_epsilon = self._own_epsilon(plan)
        with self._ledger() as ledger:
            return self._refusal(ledger, plan, own_epsilon, reserved=False)

    def refusal_of_all(self, plans: Sequence[Plan]) -> str | None:
        """Return why several plans together would be refused, or None. Spends nothing.

        Guarantee: None means that the plans can be reserved one after the other, in any order, if nothing else is.
        """
        if refusal := next((refusal for plan in plans if (refusal := self.refusal(plan))), None):
            return refusal
        rows, mine = self.rows(), self.budget
        used = rows[-1].used if rows else 0.0
        needed = sum(renyi_divergence(plan.releases, self.order, mine.adjacency) for plan in plans)
        if len(plans) + len(rows) == 1 or used + needed <= _max_divergence(mine, self.order):
            return None
        limit = f"{self.path.name} allows epsilon {mine.epsilon:g} at delta {mine.delta:g} over all runs"
        return f"{limit}; these {len(plans)} runs need more than is left ({len(rows)} are charged already)"

    def void(self, run_id: str, reason: str) -> None:
        """Record that a run has lost its guarantee. Guarantee: every later `reserve` is refused."""
        with self._ledger() as ledger:
            ledger.append("void", run=run_id, reason=reason, date=_now())

    def rows(self) -> list[ReservedRun]:
        """List the reserved runs, oldest first. The guarantee is `epsilon`, whatever the totals are."""
        with self._ledger() as ledger:
            return self._rows(ledger)

    @property
    def spent(self) -> float:
        """The smallest epsilon that admits all runs so far."""
        return max((row.total for row in self.rows()), default=0.0)

    @property
    def left(self) -> float:
        """Approximate epsilon of the largest run that still fits."""
        return min((row.left for row in self.rows()), default=self.epsilon)

    @property
    def voided(self) -> str | None:
        """Why the budget guarantees nothing any more, or None."""
        with self._ledger() as ledger:
            return _voided(ledger)

    def _ledger(self) -> Ledger:
        if self.path.is_file():
            ledger = Ledger(self.path, wait=LOCK_TIMEOUT)
            if ledger.entries and ledger.entries[0]["kind"] == "account":
                return ledger
            ledger.close()
        raise LedgerError(f"{self.path} is not the budget of a data set; create one with: sfumato budget open")

    def _own_epsilon(self, plan: Plan) -> float:
        return tightest(bounds(plan.releases, self.budget.delta, self.budget.adjacency))

    def _rows(self, ledger: Ledger) -> list[ReservedRun]:
        """List the reserved runs. Guarantee: `used` is recomputed from the releases."""
        rows: list[ReservedRun] = []
        used, max_divergence = 0.0, _max_divergence(self.budget, self.order)
        for line in (entry for entry in ledger.entries if entry["kind"] == "reserve"):
            used += renyi_divergence(
                [Release(**release) for release in line["releases"]], self.order, self.budget.adjacency
            )
            total = (
                used + self.epsilon - max_divergence
                if rows
                else min(used + self.epsilon - max_divergence, line["epsilon"])
            )
            z = math.sqrt(self.order / 2 / (max_divergence - used)) if used < max_divergence else 1e9
            left = float(dp_accounting.get_epsilon_gaussian(z, self.budget.delta))
            rows.append(ReservedRun(line["date"], line["run"], line["method"], line["epsilon"], used, total, left))
        return rows

    def _refusal(self, ledger: Ledger, plan: Plan, own_epsilon: float, *, reserved: bool) -> str | None:
        """Return why a plan is refused, or None.

        Guarantee: None only if the condition of the module docstring holds with this plan, or it is already reserved.
        """
        mine, other, name, rows = self.budget, plan.budget, self.path.name, self._rows(ledger)
        if reason := _voided(ledger):
            return f"{name} guarantees nothing any more: {reason}"
        if (other.unit, other.adjacency) != (mine.unit, mine.adjacency):
            own, planned = (f"one {budget.unit}, {budget.adjacency}" for budget in (mine, other))
            return f"{name} is a budget for {own}; this run is for {planned}, which does not compose with it"
        if not math.isfinite(own_epsilon):
            return f"a run without noise (epsilon inf) cannot be charged to {name}"
        limit = f"{name} allows epsilon {mine.epsilon:g} at delta {mine.delta:g} over all runs"
        if reserved or not rows:
            return None if reserved or own_epsilon <= mine.epsilon else f"{limit}; this run needs {own_epsilon:.3g}"
        if rows[-1].used + renyi_divergence(plan.releases, self.order, mine.adjacency) <= _max_divergence(
            mine, self.order
        ):
            return None
        used = f"{rows[-1].total:.3g} is reserved ({len(rows)} run{'s' * (len(rows) > 1)})"
        return f"{limit}; {used}, this run needs {own_epsilon:.3g}, and {rows[-1].left:.3g} is left for one more run"


def _max_divergence(budget: Budget, order: float) -> float:
    """Return the largest Renyi divergence that implies the budget: B of the module docstring."""
    return budget.epsilon - math.log1p(-1 / order) + math.log(budget.delta * order) / (order - 1)


def _voided(ledger: Ledger) -> str | None:
    return next((f"{line['reason']} (run {line['run']})" for line in ledger.entries if line["kind"] == "void"), None)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def renyi_divergence(releases: Sequence[Release], order: float, adjacency: Adjacency) -> float:
    """Return the Renyi divergence of that order of the composition. Guarantee: an upper bound, additive over releases.

    Under replace-one with subsampling it integrates over the dominating pair (proof 5 of docs/proofs.md) by the
    trapezoidal rule, whose error for this integrand is below 1e-12.
    """
    if any(release.noise == 0 for release in releases):
        return math.inf
    full, sampled = merge_gaussians(releases, adjacency)
    total = order / (2 * full**2)
    for q, z, times in sampled:
        if adjacency == "add-remove":
            with suppress_library_warnings():
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
