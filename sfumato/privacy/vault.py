"""The only access to private images.

A method asks a `Vault` for noised sums: `counts`, `sum`, `vectors` (and `gradient`, which the engine builds on it).
Each query takes the same steps: check the plan, write the charge and flush, compute each record's vector with a traced
graph, clip, weight, sum, add noise, store, return. Only `unprotected` first voids the guarantee.

Formal guarantees (proofs 1, 2, 4, 6 of docs/proofs.md): the unit is an image or a person. A person with m images is in
a sample with all of them or none. Each image's clipped vector has the weight 1/m, so that the person's vectors, over
all classes, sum to at most the clipping norm. Batches have one public size, padded with zeros, and units are in a fresh
random order; one more unit moves others, of weights below 2 in all, to new slots, for which there is a margin.
"""

from __future__ import annotations

import math
import secrets
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sfumato.privacy.accounting import Plan, Release
from sfumato.privacy.budget import BudgetExceeded
from sfumato.privacy.clipping import Groups, clip, clipped_sum
from sfumato.privacy.ledger import Ledger, LedgerError, digest
from sfumato.privacy.mechanisms import add_discrete_gaussian, add_gaussian
from sfumato.privacy.records import PrivateRecords, Query, check_labels
from sfumato.privacy.tracing import PROBES, check_on_probes, check_same_rows, per_record, probe_records, trace

Function = Callable[..., Any]
GRID_STEPS = 2**20  # integer steps of the secure form per clipping norm, times the square root of the dimension
POSITION_MARGIN = {"cpu": (1e-4, 1e-4), "cuda": (1e-3, 2e-2)}  # clipping norms: a pass, one after a map (proof 4)
MAX_PER_PERSON, MAX_RESIDENT_BYTES = 1000, 2**32  # larger image tensors stay in host memory


class RedactedError(RuntimeError):
    """A computation on private images failed. The original message is withheld: it could contain pixel values."""


class Vault(PrivateRecords):
    """Private records that answer noised queries under a plan.

    - records: has `images` uint8 or float [N, C, H, W], `labels` int64 [N] or None, public `classes`, [`persons` [N]].
    - plan: the releases that may be made, within a budget.
    - ledger: receives the charges, default: a new one in memory; facts: further fields of its first line.
    - kept: stores noised results on disk (`engine/kept_results.py`), so that a killed run can resume; default: none.
    - account: budget of the data set over many runs (`certificate/dataset_budget.py`); default: none.
    - secure: discrete noise for releases made once, default True.
    - max_per_person: public limit on the images used per person, default 1000.
    - device, performance: where and how to compute (`engine.Performance`, which cannot access noise or budget).

    Guarantee: every result, except of `unprotected`, is the Gaussian mechanism on a Poisson sample with the noise
    multiplier and probability of its ledger line. The composition of all lines is within the plan's budget.
    """

    def __init__(
        self,
        records: Any,
        plan: Plan,
        *,
        ledger: Ledger | None = None,
        facts: dict[str, Any] | None = None,
        kept: Any = None,
        account: Any = None,
        device: str | torch.device = "cpu",
        secure: bool = True,
        max_per_person: int = MAX_PER_PERSON,
        performance: Any = None,
    ) -> None:
        self.plan, self.classes, self.secure, self.device = plan, tuple(records.classes), secure, torch.device(device)
        self.ledger, self._account = ledger if ledger is not None else Ledger(), account
        self._take(records, max_per_person)
        self._performance, self._passes, self._lock = performance, 1, threading.RLock()
        self._cache: dict[str, tuple[list[Any], list[Any], Any]] = {}
        self._open_ledger(facts or {})
        if self.ledger.has_vault:
            raise LedgerError("this ledger has a vault already, and two vaults would share its charges; use one vault")
        self.ledger.has_vault = True
        self._kept = kept  # without it, whatever was charged is spent: its result may have been handed out
        self._asked = Counter({r.name: self.ledger.charged(r.name) if kept is None else 0 for r in plan.releases})
        if account is not None:
            account.reserve(self.ledger.entries[0]["run"], plan, (facts or {}).get("method"))
            if self.ledger.void:  # the process may have been killed between the two writes
                account.void(self.ledger.entries[0]["run"], self.ledger.void)

    def counts(self, *, release: str = "counts") -> Tensor:
        """Return the noised number of units per class, [classes], unrounded; each of a person's m images counts 1/m."""
        return self.sum(_ones, release=release, bound=1.0, by_class=True)[:, 0]

    def sum(
        self,
        feature: Function,
        *,
        release: str,
        bound: float,
        by_class: bool = False,
        with_labels: bool = False,
        constants: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the noised sum of `feature` rows: [features], or with `by_class` [classes, features].

        - feature: maps images (pixels in [-1, 1], or the output of `map`), their labels if `with_labels`, and constants
          to one row per image. Traced once per function object. Rows with a non-finite entry count as zero.
        - release, bound: name in the plan; L2 clipping norm of a row.
        - constants: tensor arguments of `feature` that may change between calls without a new trace.

        Guarantee: adding or removing one unit moves the exact sum by at most `bound` plus the margin for changed slots.
        The noise is the planned multiplier times this sensitivity, which is the charged event.
        """
        planned = self._planned(release)
        if not isinstance(bound, int | float) or not 1e-30 < bound < 1e30:  # a tensor could carry a gradient
            raise ValueError(f"bound must be a number between 1e-30 and 1e30, got {bound!r}")
        shared = [each.detach() for each in constants]
        size = self._batch_size(self._performance) * (1 if self._passes == 1 else 8)  # mapped rows are small
        key = [bound, by_class, with_labels, size, [each.shape for each in shared]]
        make = partial(self._sum_query, planned, shared, feature, bound, by_class, with_labels)
        query = self._cached(release, (feature,), key, make)
        answer = self._answer(planned, query, lambda: self._exact(planned, query, 1, size, shared))
        return answer if by_class else answer[0]

    def vectors(
        self,
        function: Function,
        shared: dict[str, Tensor],
        *,
        release: str,
        groups: Groups,
        by_class: bool = False,
        with_labels: bool = False,
        normals: tuple[int, ...] = (),
        performance: Any = None,
    ) -> Tensor:
        """Return the noised sum of vectors in pieces, clipped by groups (`clipping.py`): [1 or classes, entries].

        - function: maps `shared`, one image, its label if `with_labels`, and standard normal numbers of shape `normals`
          if given, to pieces. Traced once per function object.
        - shared: tensors by name; with `by_class` stacked, [classes, ...]: a record uses, and adds to, its class alone.
        - groups: clipping norms and the pieces that they apply to.

        Guarantee: adding or removing one unit moves the exact sum by at most the root of the sum of squared clipping
        norms, plus margins for changed batch slots and float32 sums. Noise of the planned multiplier times this
        sensitivity is added to all entries, which is the charged event.
        """
        planned, perf = self._planned(release), performance or self._performance
        groups = [(float(bound), tuple(indices)) for bound, indices in groups]  # copies, which the caller cannot change
        if not all(1e-30 < bound < 1e30 for bound, _ in groups) or self._secure(planned) or planned.nonnegative:
            raise ValueError(f"release {release!r}: vectors need finite bounds, times > 1 and nonnegative=False")
        lanes, size, values = len(self.classes) if by_class else 0, self._batch_size(perf), list(shared.values())
        key = [perf, str(groups), lanes, with_labels, normals, size, [each.shape for each in values]]
        make = partial(self._vector_query, function, dict(shared), groups, perf, lanes, with_labels, normals, size)
        query = self._cached(release, (function,), key, make)
        return self._answer(planned, query, lambda: self._exact(planned, query, lanes or 1, size, values, normals))

    def map(self, transform: Function) -> Self:
        """Return a vault over the same records with a public row-wise `transform` applied once and stored.

        Guarantee: nothing is released; ledger, plan and charges are shared. Sums have the margin of both passes.
        """
        graph, shape = self._traced(transform, (), False)
        rows = self._void_on_failure(lambda: self._mapped(graph, shape, self._batch_size(self._performance)))
        mapped = object.__new__(type(self))
        mapped.__dict__.update(self.__dict__)
        mapped._images, mapped._cache, mapped._passes = rows, {}, self._passes + 1
        return mapped

    def unprotected(self, reason: str) -> tuple[Tensor, Tensor | None]:
        """Return the raw images and labels. Guarantee: none, and the ledger says so on disk before this returns."""
        if not reason:
            raise ValueError("give the reason why raw images are needed; the certificate will state it")
        self._void(reason)
        return self._images, self._labels

    @property
    def asked(self) -> dict[str, int]:
        """Number of results of each release that this run has returned so far."""
        return dict(self._asked)

    def skip(self, asked: Mapping[str, int]) -> None:
        """Continue after these results, which a restored checkpoint already contains. Guarantee: never goes back."""
        self._asked |= Counter(asked)

    def forget(self) -> None:
        """Delete stored results of repeated releases, after a checkpoint that contains them was written."""
        with self._lock:
            if self._kept is not None:
                self._kept.forget({r.name: self._asked[r.name] for r in self.plan.releases if r.times > 1})

    def _answer(self, release: Release, query: Query, exact: Callable[[], Tensor]) -> Tensor:
        """Return a release's next result. Guarantee: charged before an image is read, and noised once for all."""
        with self._lock:
            number = self._asked[release.name]
            kept: Tensor | None = None if self._kept is None else self._kept.get(release.name, number)
            if kept is None:
                self._charge(release, number)
            self._asked[release.name] += 1
        if kept is not None:
            return kept.to(self.device)
        total = self._void_on_failure(exact)
        noised = (self._noised(release, total, query.sensitivity, self._secure(release)) * query.grid_step).float()
        with self._lock:
            if self._kept is not None:
                self._kept.put(release.name, number, noised)
        return noised

    def _charge(self, release: Release, number: int) -> None:
        """Charge result `number`, a hundredth of `times` in advance. Guarantee: on disk, and never beyond the plan."""
        self.ledger.check_open()
        charged = self.ledger.charged(release.name)
        if number >= charged:
            if charged >= release.times:
                raise BudgetExceeded(f"release {release.name!r} is spent: all of its {release.times} times are charged")
            block = min(release.times - charged, math.ceil(release.times / 100))
            self.ledger.append("charge", **{**self._event(release), "times": block})

    def _noised(self, release: Release, exact: Tensor, sensitivity: float, secure: bool) -> Tensor:
        """Return the sum with noise. Guarantee: the exact sum is used nowhere after this."""
        if secure:
            return add_discrete_gaussian(exact.to(torch.int64), release.noise * sensitivity).double()
        return add_gaussian(exact, release.noise * sensitivity)

    def _sum_query(
        self, release: Release, shared: list[Tensor], feature: Function, bound: float, by_class: bool, labelled: bool
    ) -> Query:
        """Return the query that sums the rows of a feature. Guarantee: no private record is read.

        In the secure form rows are truncated to integers, which cannot increase their norm (it is checked again); sums
        are exact, as float64 represents integers below 2^53. In another slot, an entry may be truncated to the next.
        """
        graph, shape = self._traced(feature, shared, labelled)
        count, nonnegative, perf = len(shared), release.nonnegative, self._performance
        width, groups, secure = shape.numel(), len(self.classes) if by_class else 1, self._secure(release)
        steps = math.ceil(GRID_STEPS * math.sqrt(width))
        grid_step, row_norm = (bound / steps, steps + 1.0) if secure else (1.0, float(bound))

        def run(weights: Tensor, *given: Tensor) -> Tensor:
            constants, images, labels = given[:count], given[-2][0], given[-1][0]
            records = (images, labels) if labelled else (images,)
            rows = per_record(graph, count, len(records))(*constants, *records).reshape(len(images), -1)
            rows = clip(rows, bound, grid_step, nonnegative) * weights[0, :, None]
            if secure:
                rows.masked_fill_(torch.linalg.vector_norm(rows.trunc_(), dim=1, keepdim=True) > row_norm, 0)
            return rows.sum(0, keepdim=True) if groups == 1 else nn.functional.one_hot(labels, groups).double().T @ rows

        moved = row_norm * self._margin + (self._passes * self._cap * math.sqrt(width) if secure else 0.0)
        moved *= math.sqrt(2) if release.shift(self.plan.budget.adjacency) == math.sqrt(2) else 1  # replaced: proof 4
        return Query(run, groups, width, row_norm + moved, grid_step, perf and perf.accelerate(run))

    def _vector_query(
        self, function: Any, shared: Any, groups: Groups, perf: Any, lanes: int, labelled: bool, normals: Any, size: int
    ) -> Query:
        """Return the query that clips and sums the pieces of a function. Guarantee: no private record is read."""
        device, names = self.device, tuple(shared)  # `run` travels to the workers of a cluster, without `self`
        probes = self._probes(labelled) + ([probe_records(normals, device)] if normals else [])
        single = {name: value[0] for name, value in shared.items()} if lanes else shared
        with torch.no_grad():
            graph = trace(function, single, *(part[0] for part in probes), subject="this loss")
            check_on_probes(graph, [single], probes, "this loss")
            pieces = tree_map(lambda part: part[None], per_record(graph, 1, len(probes))(single, *probes))
            width = clipped_sum(pieces, groups, torch.ones(1, PROBES, device=self.device)).shape[1]

        def run(weights: Tensor, *given: Tensor) -> Tensor:
            state, (images, labels, *own) = dict(zip(names, given, strict=False)), given[len(names) :]
            records = (images, *((labels,) if labelled else ()), *own)
            mapped = per_record(graph, 1, len(records))
            if lanes > 1 and device.type != "cpu":
                return clipped_sum(torch.vmap(mapped, randomness="error")(state, *records), groups, weights)
            sums = []  # on a CPU one network after the other: batching them would only cost copies
            for lane in range(lanes or 1):
                one = {name: value[lane] for name, value in state.items()} if lanes else state
                pieces = tree_map(lambda part: part[None], mapped(one, *(part[lane] for part in records)))
                sums.append(clipped_sum(pieces, groups, weights[lane : lane + 1]))
            return torch.cat(sums)

        sensitivity = math.sqrt(math.fsum(bound**2 for bound, _ in groups))
        # A float32 sum over a batch has `size` rounding errors, taken as random, of 2^-24 of at most `size` weights. A
        # unit of m images changes at most 2m batches, of weights below 2/m (proof 4). Batches add in float64.
        sensitivity *= 1 + self._margin + (2 if self._cap == 1 else 4) * math.sqrt(size) * size * 2.0**-24
        return Query(run, lanes or 1, width, sensitivity, fast=perf and perf.accelerate(run))

    def _traced(self, feature: Function, constants: Sequence[Tensor], labelled: bool) -> tuple[Any, torch.Size]:
        """Return the graph of a feature and the shape of a row. Guarantee: no private record is read."""
        probes = self._probes(labelled)

        def one(*given: Tensor) -> Tensor:
            row: Tensor = feature(*(part[None] for part in given[len(constants) :]), *given[: len(constants)])
            if row.shape[:1] != (1,):
                raise ValueError(f"a feature must return one row per image, got {tuple(row.shape)} for one image")
            return row[0].detach()

        with torch.no_grad():
            together = feature(*(part.clone() for part in probes), *constants).detach()  # first: it may fill caches
            graph = trace(one, *constants, *(part[0] for part in probes))
            rows = check_on_probes(graph, constants, probes, "this feature")[0]
        check_same_rows(rows, together, "this feature mixes the images of a batch: alone, an image has another row")
        return graph, rows.shape[1:]

    def _probes(self, labelled: bool) -> list[Tensor]:
        """Return public probe images of the records' shape and, if `labelled`, labels for them."""
        images = probe_records(self._images.shape[1:], self.device)
        return [images, torch.arange(PROBES, device=self.device) % len(self.classes)][: 1 + labelled]

    def _cached(self, name: str, held: tuple[Any, ...], key: list[Any], make: Callable[[], Any]) -> Any:
        """Return the cached result of `make` for the same functions or models (by identity) and the same key."""
        parts = [part for each in held for part in (getattr(each, "__func__", each), getattr(each, "__self__", None))]
        known = self._cache.get(name)
        if known is None or known[1] != key or not all(a is b for a, b in zip(known[0], parts, strict=True)):
            known = self._cache[name] = parts, key, make()
        return known[2]

    def _take(self, records: Any, max_images: int) -> None:
        """Take the records. Guarantee: each is in one class, and belongs to one unit of the planned kind."""
        images, persons = records.images.detach(), getattr(records, "persons", None)
        self._images = images.to(self.device) if images.nbytes <= MAX_RESIDENT_BYTES else images
        self._labels = check_labels(records.labels, len(images), len(self.classes))
        if self.plan.budget.unit == "image":
            persons, max_images = None, 1
        elif persons is None or persons.shape != (len(images),) or type(max_images) is not int or max_images < 1:
            raise ValueError("the unit is a person: give persons, one number per image, and max_per_person >= 1")
        self._set_units(persons, max_images)

    def _open_ledger(self, facts: dict[str, Any]) -> None:
        """Write the first line. Guarantee: raises if a resumed ledger was opened for another plan or other facts."""
        budget = self.plan.budget
        opening = {
            **{name: getattr(budget, name) for name in ("delta", "adjacency", "unit")},
            "epsilon": budget.epsilon if budget.private else None,
            "max_per_person": self._cap if budget.unit == "person" else None,
            "plan": [self._event(release) for release in self.plan.releases],
            "account": None if self._account is None else self._account.path.name,
        }
        if clash := (opening.keys() | {"seq", "kind", "previous", "hash", "run"}) & facts.keys():
            raise ValueError(f"facts may not contain {', '.join(sorted(clash))}: the plan sets them")
        if self.ledger.opening is None:
            self.ledger.append("open", run=self._new_run(), **opening, **facts)
        for field, value in {**opening, **facts}.items():
            if digest((self.ledger.opening or {}).get(field)) != digest(value):
                raise LedgerError(f"the ledger was opened with another {field}; resume with the same settings")

    def _new_run(self) -> str:
        return secrets.token_hex(16)  # identifies this run in the data set's budget

    def _event(self, release: Release) -> dict[str, Any]:
        """Return a release as the ledger stores it. Guarantee: contains everything that epsilon depends on."""
        fields = ("name", "times", "sampling_prob", "noise_multiplier", "nonnegative")
        return {name: getattr(release, name) for name in fields} | {"noise": ["fast", "secure"][self._secure(release)]}

    def _secure(self, release: Release) -> bool:
        return self.secure and release.times == 1  # discrete noise only for releases made once, as it is slow

    def _planned(self, name: str) -> Release:
        if name not in (names := [release.name for release in self.plan.releases]):
            raise BudgetExceeded(f"release {name!r} is not in the plan ({', '.join(names)}); nothing was spent")
        return self.plan[name]

    def _batch_size(self, performance: Any) -> int:
        return getattr(performance, "batch_size", None) or (128 if self.device.type == "cpu" else 512)

    @property
    def _margin(self) -> float:
        """Bound, in clipping norms, on the rounding that changes when units of total weight 1 (2) take other slots."""
        first, after_map = POSITION_MARGIN.get(self.device.type, (1e-2, 2e-2))
        return (first + (self._passes - 1) * after_map) * (1 if self._cap == 1 else 2)

    def _void(self, reason: str) -> None:
        """Void the guarantee. Guarantee: on disk when this returns, for this run and for the data set's budget."""
        self.ledger.append("unprotected", reason=reason)
        if self._account is not None:
            self._account.void(self.ledger.entries[0]["run"], reason)

    def _void_on_failure(self, compute: Callable[[], Tensor]) -> Tensor:
        """Guarantee: if a computation on private images fails, the run is void on disk before the failure is visible.

        A failure is an answer without noise: an operator can be made to fail on one image and on no other.
        """
        flags = {"benchmark": False, "deterministic": True, "allow_tf32": torch.backends.cudnn.allow_tf32}
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, **flags), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning, too, could reveal something about an image
            try:
                total = compute()
                if self.device.type != "cpu":
                    torch.accelerator.synchronize(self.device)  # a device reports errors only then
                return total
            except Exception as error:  # not KeyboardInterrupt, which does not depend on an image
                failed = f"the computation failed on private images with {type(error).__name__}"
        self._void(failed)  # outside the handler: the error and its traceback are gone
        raise RedactedError(
            f"{failed}. The message is withheld, as it could contain pixel values. The failure itself may depend on an "
            "image, so the run's guarantee is void: fix the cause (out of memory: smaller batches) and start a new run"
        )

    def __repr__(self) -> str:
        return f"Vault({len(self.classes)} classes, shape {tuple(self._images.shape[1:])})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a vault holds private images and cannot be copied or pickled")


def _ones(images: Tensor) -> Tensor:
    return images.new_ones(len(images), 1)
