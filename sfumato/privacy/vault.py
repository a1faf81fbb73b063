"""The one door to private images.

A method gets a `Vault` and asks it for noised sums: `counts`, `sum`, `gradient`. Each query goes the same way: is it in
the plan → write the charge to the ledger and flush → compute each record's vector by a traced graph (`tracing.py`) →
clip (`clipping.py`) → weigh → sum → noise → keep (`keeping.py`) → hand out. There is no way to ask for anything else,
except `unprotected`, which voids the guarantee first. What a method does with an answer is post-processing.

**Units.** The guarantee hides one image, or one person with all their images. A person with m images takes part in a
sample with all of them or none, and each image's clipped vector has the weight 1/m. So, whatever the classes of the
images are, a person adds sum_i v_i / m with |v_i| <= bound, which has norm at most bound: by the triangle inequality
over the whole vector, all classes and networks included. No parallel composition over classes is assumed.

**A probability per class.** A sum may draw each class with a probability q_c of its own, none above the planned q, and
is charged for q. That is enough: to draw with q_c is to draw with q and to keep with probability t = q_c / q. So with
P and Q the outputs of the plain query with q on neighbouring sets, and O on the set without the record in question,
the outputs are (1 - t) O + t P and (1 - t') O + t' Q: a mixture of the pairs (P, Q), (P, O), (O, Q) and (O, O). The
hockey-stick divergence is jointly convex, and each pair's is at most that of the accounted pair, since adding or
removing a record is what is charged (under replace-one: is replacing it by a row of zeros). So is the mixture's. It is
for images only: a person may have several classes.

**Numbers of a record's own** (`draws`) are drawn independently of everything. Given them, the release is the plain one;
so outputs on neighbouring sets are mixtures, with the same weights, of outputs as close as what is charged.

**Rounding.** Batches have one public size, filled up with zeros, and records stand in a fresh random order. A unit of m
records more then moves at most m other records to other places. Measured on the shipped features and gradients
(`benchmarks/results/place.json`), a place changes nothing, to the last bit; `PLACE_MARGIN` is charged all the same.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from sfumato.privacy.account import Account
from sfumato.privacy.accounting import Plan, Release
from sfumato.privacy.budget import BudgetExceeded
from sfumato.privacy.clipping import Groups, clip, clipped_sum
from sfumato.privacy.keeping import Kept
from sfumato.privacy.ledger import Ledger, LedgerError, digest
from sfumato.privacy.mechanisms import add_discrete_gaussian, add_gaussian
from sfumato.privacy.sampling import capped, poisson_sample, shuffled, standard_normals
from sfumato.privacy.tracing import TRIED, per_record, public_records, same_rows, trace, try_out

Feature = Callable[..., torch.Tensor]  # of images, labels if asked for, and constants, to a row for each image

GRID_STEPS = 2**20  # integer steps of the secure form per bound, times the square root of the dimension
PLACE_MARGIN = 1e-6  # of a bound, for each record of a unit
MAX_PER_PERSON = 1000
RESIDENT = 2**32  # bytes of images that may live on an accelerator


class Records(Protocol):
    """Private images with labels: uint8 or float [N, C, H, W], int64 [N] or None, and the public class names."""

    @property
    def images(self) -> torch.Tensor: ...
    @property
    def labels(self) -> torch.Tensor | None: ...
    @property
    def classes(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Differentiated:
    """A loss as a function of one record, as an engine makes it: whatever it gives is traced and clipped.

    - function: of parameters and buffers by name, and a record's image, label, normals, to pieces (`clipping.py`).
    - groups: bounds, and the pieces that are clipped to each.
    - assemble: from the noised sum, [lanes, numbers], to gradients by name.
    """

    function: Callable[..., Any]
    groups: Groups
    assemble: Callable[[torch.Tensor], dict[str, torch.Tensor]]


class Performance(Protocol):
    """How to compute faster (`sfumato.engine.Performance`). It is told neither noise nor budget."""

    @property
    def batch_size(self) -> int | None: ...
    def differentiate(
        self, model: nn.Module, loss: Feature, bound: Any, classes: int | None, views: int, tried: Sequence[torch.Tensor]
    ) -> Differentiated: ...
    def accelerate(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]: ...


@dataclass(frozen=True)
class _Prepared:
    """A traced query: what it does to a batch, and the bound that the noise is for."""

    run: Callable[..., torch.Tensor]  # of weights, what is shared, and records: the sum over a batch, [rows, width]
    rows: int
    width: int
    radius: float
    unit: float = 1.0
    assemble: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None


class FailedOnPrivate(RuntimeError):
    """Something failed on private images. What it said is not passed on: it could hold pixels."""


class Vault:
    """Private records behind noised queries, under a plan.

    - plan: the releases to come, accounted (`Plan`).
    - ledger: where charges go; in memory if left out. facts: for its first line (method, parameters, public facts).
    - folder: keeps noised results and checkpoints there, so that a killed run goes on.
    - account: the data set's budget over many runs, from which the plan is reserved first.
    - max_per_person: public cap on the images of a person that are used, where the unit is a person.
    - secure: exact discrete noise for releases that are made once.
    - performance: how to compute faster; needed for gradients.

    Guarantee: everything that leaves, except through `unprotected`, is the Gaussian mechanism on a
    Poisson sample with the noise and at most the probability of its ledger line; the composition of all lines is within
    the plan's budget, checked before an image is read. Image shape, class names and their number are public.
    """

    def __init__(
        self,
        records: Records,
        plan: Plan,
        *,
        ledger: Ledger | None = None,
        facts: dict[str, Any] | None = None,
        folder: Path | None = None,
        account: Account | None = None,
        device: str | torch.device = "cpu",
        secure: bool = True,
        max_per_person: int = MAX_PER_PERSON,
        performance: Performance | None = None,
    ) -> None:
        self.plan, self.classes, self.secure = plan, tuple(records.classes), secure
        self.device, self._performance = torch.device(device), performance
        self.ledger = ledger if ledger is not None else Ledger()
        self._images = records.images.detach()
        if self._images.nbytes <= RESIDENT:
            self._images = self._images.to(self.device)
        self._labels = _checked(records.labels, len(self._images), len(self.classes))
        self._seat_units(getattr(records, "persons", None), max_per_person)
        self._passes, self._asking, self._account = 1, threading.RLock(), account
        self._prepared: dict[str, tuple[list[Any], _Prepared]] = {}
        self._open(facts or {})
        self._kept = Kept(folder, self.ledger)
        # Results that were not kept are spent: they may have been handed out.
        spent = {r.name: 0 if folder is not None else self.ledger.charged(r.name) for r in plan.releases}
        self._asked = Counter(spent)
        if account is not None:
            account.reserve(self.ledger.entries[0]["run"], plan, (facts or {}).get("method"))

    # -- queries ------------------------------------------------------------------------------------------

    def counts(self, *, release: str = "counts") -> torch.Tensor:
        """Return noisy numbers of units per class, [classes], unrounded and possibly negative.

        A person with images of several classes counts in each by the share of the images.

        Guarantee: a sum of one-hot rows, norm 1; the Gaussian mechanism with the plan's noise.
        """
        return self.sum(_ones, release=release, bound=1.0, by_class=True)[:, 0]

    def sum(
        self,
        feature: Feature,
        *,
        release: str,
        bound: float,
        by_class: bool = False,
        with_labels: bool = False,
        constants: Sequence[torch.Tensor] = (),
        sampling_prob: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Return the noisy sum of `feature` rows, each clipped to `bound` in L2: [features], or [classes, features].

        - feature: maps a batch (pixels in [-1, 1], or what `map` made of them), its labels if `with_labels`, and the
          `constants`, to a row for each image. It is traced once for each function object; tensors that change from
          call to call are `constants`.
        - sampling_prob: a probability for each class, none above the planned one; left out: the planned one.

        Rows with a NaN or an infinity count as zero.

        Guarantee: adding or removing one unit moves the exact sum by at most `bound`, and by `PLACE_MARGIN` of it for
        each record whose place changes; noise of the planned multiplier times both makes the charged event.
        """
        planned = self._planned(release)
        if not isinstance(bound, int | float) or not 1e-30 < bound < 1e30:  # a tensor could carry a derivative
            raise ValueError(f"bound must be a number between 1e-30 and 1e30, got {bound!r}")
        shares = None if sampling_prob is None else self._shares(sampling_prob, planned)
        shared = [each.detach() for each in constants]
        size = self._batch_size(self._performance) * (1 if self._passes == 1 else 8)  # mapped: most of the work is done
        key = [feature, float(bound), by_class, with_labels, size, *(each.shape for each in shared)]
        found = self._remembered(release, key, lambda: self._prepare_sum(feature, planned, key, shared))
        answer = self._answer(planned, found, lambda: self._exact(found, planned, shares, 1, size, shared))
        return answer if by_class else answer[0]

    def gradient(
        self,
        model: nn.Module,
        loss: Feature,
        *,
        release: str,
        bound: float | Mapping[str, float],
        by_class: bool = False,
        with_labels: bool = False,
        views: int = 1,
        draws: int = 0,
        performance: Performance | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the noisy sum of per-example gradients, each clipped in L2, by the names of the parameters.

        - loss: `loss(model, images, [labels], [normals])` gives one number per image. It is traced once for each model
          and loss; afterwards only the values of parameters and buffers may change.
        - bound: for all trainable parameters together, or one for each group of them (`{"encoder": 1.0, "flow": 0.1}`:
          beginnings of names).
        - by_class: the parameters are stacked, [classes, ...] (`nets/stacked.py`): an image goes through its class's
          network, which is what the loss gets, and moves that slice only.
        - views, draws: each image is evaluated `views` times, each time with `draws` standard normal numbers of its own,
          [images, draws]; the gradient of the mean is clipped.

        The caller divides by public numbers and takes the step.

        Guarantee: adding or removing one unit moves the exact sum by at most the root of the sum of squared bounds,
        with margins for rounding by place and in float32 sums; noise of the planned multiplier times that goes on all
        parameters, which makes the charged event.
        """
        planned, faster = self._planned(release), performance or self._performance
        if faster is None:
            raise ValueError("gradients need performance=sfumato.engine.Performance()")
        if self._secure(planned) or planned.nonnegative:
            raise ValueError(f"release {release!r}: gradients need fast noise (times > 1, or secure=False) and signs")
        if views < 1 or draws < 0 or (views > 1 and not draws):
            raise ValueError(f"{views} views with {draws} random numbers each: views must differ by something")
        state = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
        size, lanes = self._batch_size(faster), len(self.classes) if by_class else 1
        bounds = tuple(bound.items()) if isinstance(bound, Mapping) else bound
        key = [model, loss, faster, bounds, by_class, with_labels, views, draws, size]
        key += [(name, value.shape, value.requires_grad) for name, value in model.named_parameters()]
        found = self._remembered(release, key, lambda: self._prepare_gradient(planned, key, state, bound))
        shared, own = list(state.values()), (views, draws)
        noised = self._answer(planned, found, lambda: self._exact(found, planned, None, lanes, size, shared, own))
        assert found.assemble is not None
        return found.assemble(noised)

    def map(self, transform: Feature) -> Vault:
        """Return a vault over the same records with a public row-wise `transform` applied once and kept in memory.

        Guarantee: nothing leaves; same ledger, same plan, same charges. Rounding by place can move records here, for
        good; sums of what is mapped have the margin of both passes.
        """
        graph, shape = self._traced(transform, (), False)
        home, size = self._images.device, self._batch_size(self._performance)
        kept = torch.zeros(len(self._images), *shape, device=home)
        with _VoidOnFailure(self), torch.no_grad(), _repeatable(self.device):
            for index in shuffled(torch.arange(len(kept))).split(size):
                filled = torch.cat([index, index.new_full((size - len(index),), -1)])
                rows = per_record(graph, 0, 1)(self._pixels(filled))[: len(index)]
                kept[index.to(home)] = rows.float().to(home)
        mapped = object.__new__(type(self))
        mapped.__dict__.update(self.__dict__)
        mapped._images, mapped._prepared, mapped._passes = kept, {}, self._passes + 1
        return mapped

    def remaining(self, release: str) -> int:
        """Return how many releases of that name can still be had. Guarantee: depends on the ledger only."""
        return self._planned(release).times - self._asked[release]

    def unprotected(self, reason: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the raw images and labels.

        Guarantee: none, from here on and for good; that is on the disk before this returns.
        """
        if not reason:
            raise ValueError("say why the raw images are needed; the certificate will show it")
        self._void(reason)
        return self._images, self._labels

    # -- runs that go on ----------------------------------------------------------------------------------

    @property
    def asked(self) -> dict[str, int]:
        """How many results of each release were handed out in this run so far. Guarantee: control flow only."""
        return dict(self._asked)

    def forget(self) -> None:
        """Drop kept results of repeated releases: the caller has stored a state that they went into."""
        self._kept.forget({release.name: self._asked[release.name] for release in self.plan.releases if release.times > 1})

    def skip(self, asked: Mapping[str, int]) -> None:
        """Go on after these results: a stored state holds what came of them. Guarantee: forward only."""
        self._asked |= Counter(asked)

    def close(self, *, finished: bool = False) -> None:
        """Let go of the kept results; of a finished run, remove them."""
        self._kept.close(finished=finished)

    # -- the steps of a query -----------------------------------------------------------------------------

    def _prepare_sum(self, feature: Feature, release: Release, key: list[Any], shared: list[torch.Tensor]) -> _Prepared:
        """Return a traced feature and how its rows are summed. Guarantee: no private record is read.

        In the secure form rows are cut to whole units towards zero, which cannot lengthen them; their norm is checked
        in whole numbers, and sums are exact: float64 holds integers below 2^53. A record at another place may be cut
        otherwise, by one unit in each entry.
        """
        _, bound, by_class, with_labels, *_ = key
        graph, shape = self._traced(feature, shared, with_labels)
        width = shape.numel()
        steps, groups = math.ceil(GRID_STEPS * math.sqrt(width)), len(self.classes) if by_class else 1
        secure = self._secure(release)
        unit, radius = (bound / steps, steps + 1.0) if secure else (1.0, bound)

        def run(weights: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
            constants, images, labels = given[: len(shared)], given[-2][0], given[-1][0]
            records = (images, labels) if with_labels else (images,)
            rows = per_record(graph, len(shared), len(records))(*constants, *records).reshape(len(images), -1)
            rows = clip(rows, bound, unit, release.nonnegative) * weights[0, :, None]
            if secure:
                rows.masked_fill_(torch.linalg.vector_norm(rows.trunc_(), dim=1, keepdim=True) > radius, 0)
            if groups == 1:
                return rows.sum(0, keepdim=True)
            return nn.functional.one_hot(labels, groups).double().T @ rows

        moved = radius * (1 + self._margin) + (self._passes * self._most * math.sqrt(width) if secure else 0.0)
        return _Prepared(self._accelerated(self._performance, run), groups, width, moved, unit)

    def _prepare_gradient(self, release: Release, key: list[Any], state: dict[str, torch.Tensor], bound: Any) -> _Prepared:
        """Return a traced loss's gradient and how it is clipped and summed. Guarantee: no private record is read."""
        model, loss, faster, _, by_class, with_labels, views, draws, size, *_ = key
        lanes = len(self.classes) if by_class else 1
        tried = self._tried(with_labels) + ([public_records((views, draws), self.device)] if draws else [])
        found = faster.differentiate(model, loss, bound, lanes if by_class else None, views, tried)
        single = {name: value[0] for name, value in state.items()} if by_class else state
        with torch.no_grad():
            graph = trace(found.function, single, *(part[0] for part in tried), what="this loss")
            try_out(graph, [single], tried, "this loss")
            each = tree_map(lambda part: part[None], per_record(graph, 1, len(tried))(single, *tried))
            width = clipped_sum(each, found.groups, torch.ones(1, TRIED, device=self.device)).shape[1]

        def run(weights: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
            shared = dict(zip(state, given, strict=False))
            images, labels, *normals = given[len(state) :]
            records = (images, *((labels,) if with_labels else ()), *normals)
            each = per_record(graph, 1, len(records))
            if lanes > 1 and self.device.type != "cpu":
                return clipped_sum(torch.vmap(each, randomness="error")(shared, *records), found.groups, weights)
            sums = []  # on a CPU networks take turns: side by side they would only be moved about
            for lane in range(lanes):
                own = {name: value[lane] for name, value in shared.items()} if by_class else shared
                made = tree_map(lambda part: part[None], each(own, *(part[lane] for part in records)))
                sums.append(clipped_sum(made, found.groups, weights[lane : lane + 1]))
            return torch.cat(sums)

        radius = math.sqrt(math.fsum(each**2 for each, _ in found.groups))
        # Batches are added up in float64. In a batch, errors of 2^-24 of sums of at most `size` bounds come `size`
        # times, at random; a record more changes two batches, its own and that of the record it displaces.
        radius *= 1 + self._margin + self._most * 2 * math.sqrt(size) * size * 2.0**-24
        return _Prepared(self._accelerated(faster, run), lanes, width, radius, assemble=found.assemble)

    def _exact(
        self,
        found: _Prepared,
        release: Release,
        shares: list[float] | None,
        lanes: int,
        size: int,
        shared: list[torch.Tensor],
        own: tuple[int, int] = (1, 0),
    ) -> torch.Tensor:
        """Return the exact sum over a fresh Poisson sample, [rows, width], float64. Guarantee: seen by `_noised` only."""
        total = torch.zeros(found.rows, found.width, dtype=torch.float64, device=self.device)
        for records, weights in self._batches(self._drawn(release, shares), lanes, size, own):
            total += found.run(weights, *shared, *records)
        return total

    def _answer(self, release: Release, found: _Prepared, exact: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the next result of a release: charge, compute, noise, keep; or the one that was kept.

        Guarantee: each result is charged before an image is read, and noised once for all before it leaves.
        """
        with self._asking:
            number = self._asked[release.name]
            kept = self._kept.get(release.name, number)
            if kept is None:
                self._charge(release, number)
            self._asked[release.name] += 1
        if kept is not None:
            return kept.to(self.device)
        with _VoidOnFailure(self), torch.no_grad(), _repeatable(self.device):
            total = exact()
        noised = (self._noised(release, total, found.radius, self._secure(release)) * found.unit).float()
        self._kept.put(release.name, number, noised)
        return noised

    def _charge(self, release: Release, number: int) -> None:
        """Pay for result `number`; long runs pay for a hundredth at a time.

        Guarantee: returns only when the charge is on the disk; raises `BudgetExceeded` rather than pass the plan.
        """
        self.ledger.check_open()
        charged = self.ledger.charged(release.name)
        if number < charged:
            return
        left = release.times - charged
        if left <= 0:
            raise BudgetExceeded(
                f"release {release.name!r} was charged all its {release.times} times: the budget is spent"
            )
        block = min(left, math.ceil(release.times / 100))
        self.ledger.append("charge", **{**self._event(release), "times": block})

    def _noised(self, release: Release, exact: torch.Tensor, radius: float, secure: bool) -> torch.Tensor:
        """Return the sum with its noise. Guarantee: the last place where the exact sum is seen."""
        if secure:
            return add_discrete_gaussian(exact.to(torch.int64), release.noise * radius).double()
        return add_gaussian(exact, release.noise * radius)

    def _void(self, reason: str) -> None:
        """Guarantee: on the disk when this returns, for this run and for the data set's budget."""
        self.ledger.append("unprotected", reason=reason)
        if self._account is not None:
            self._account.void(self.ledger.entries[0]["run"], reason)

    # -- records ------------------------------------------------------------------------------------------

    def _seat_units(self, persons: torch.Tensor | None, most: int) -> None:
        """Set who is a unit: `_chosen` records, `_unit_of` each, and `_weights`. Guarantee: module docstring, Units."""
        count = len(self._images)
        self._most, self._chosen, self._unit_of = 1, torch.arange(count), torch.arange(count)
        self._weights, self._units = torch.ones(count, dtype=torch.float64), count
        if self.plan.budget.unit == "image":
            return
        if persons is None or persons.shape != (count,) or type(most) is not int or most < 1:
            raise ValueError("the unit is a person: say whose each image is (persons), and use at least one of each")
        _, self._unit_of = persons.detach().cpu().unique(return_inverse=True)
        self._most, self._units = most, int(self._unit_of.max()) + 1 if count else 0
        self._chosen = capped(self._unit_of, most)
        sizes = torch.bincount(self._unit_of[self._chosen], minlength=self._units)
        self._weights = 1.0 / sizes[self._unit_of].double()

    def _drawn(self, release: Release, shares: list[float] | None) -> torch.Tensor:
        """Return which records are in this release. Guarantee: `poisson_sample` of units, afresh for every release."""
        probability: Any = release.sampling_prob
        if shares is not None:
            probability = shares[0] if self._labels is None else np.array(shares)[self._labels.numpy()]
        there = torch.zeros(self._units, dtype=torch.bool)
        there[poisson_sample(self._units, probability)] = True
        return self._chosen[there[self._unit_of[self._chosen]]]

    def _batches(
        self, chosen: torch.Tensor, lanes: int, size: int, own: tuple[int, int]
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """Yield batches of records: ([images, labels, normals], weights), [lanes, size, ...]; one lane, or classes.

        Guarantee: shapes do not depend on the records; where there is none there are zeros, of weight zero.
        """
        order, (views, draws) = shuffled(chosen), own
        labels = torch.zeros(len(self._images), dtype=torch.int64) if self._labels is None else self._labels
        groups = [order] if lanes == 1 else [order[labels[order] == lane] for lane in range(lanes)]
        for start in range(0, max(map(len, groups)), size):
            index = torch.full((lanes, size), -1)
            for row, group in zip(index, groups, strict=True):
                here = group[start : start + size]
                row[: len(here)] = here
            there, place = index >= 0, index.clamp_min(0)
            records = [self._pixels(index), torch.where(there, labels[place], 0).to(self.device)]
            if draws:
                records.append(self._normals(index, views * draws).reshape(lanes, size, views, draws))
            yield records, torch.where(there, self._weights[place], 0.0).to(self.device)

    def _pixels(self, index: torch.Tensor) -> torch.Tensor:
        """Return images as float, uint8 in [-1, 1]; zeros for the index -1."""
        images = self._images[index.clamp_min(0).to(self._images.device)].to(self.device)
        images = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float()
        return images.masked_fill_(_like((index < 0).to(self.device), images), 0)

    def _normals(self, index: torch.Tensor, count: int) -> torch.Tensor:
        """Return random numbers of each record of a batch. Guarantee: independent of each other and everything else."""
        return standard_normals(index.numel(), count, self.device)

    # -- graphs, and checks that cost nothing -------------------------------------------------------------

    def _tried(self, with_labels: bool) -> list[torch.Tensor]:
        """Return public images, and labels, of the records' shape."""
        images = public_records(self._images.shape[1:], self.device)
        return [images, torch.arange(TRIED, device=self.device) % len(self.classes)][: 1 + with_labels]

    def _traced(
        self, feature: Feature, constants: Sequence[torch.Tensor], with_labels: bool
    ) -> tuple[GraphModule, torch.Size]:
        """Return the graph of a feature and the shape of a row. Guarantee: no private record is read."""
        tried = self._tried(with_labels)

        def one(*given: torch.Tensor) -> torch.Tensor:
            shared, record = given[: len(constants)], given[len(constants) :]
            row = feature(*(part[None] for part in record), *shared)
            if row.shape[:1] != (1,):
                raise ValueError(f"a feature must give one row per image, got {tuple(row.shape)} for one image")
            return row[0].detach()

        with torch.no_grad():
            graph = trace(one, *constants, *(part[0] for part in tried))
            rows = try_out(graph, constants, tried)[0]
            together = feature(*(part.clone() for part in tried), *constants).detach()
        same_rows(rows, together, "this feature mixes the images of a batch: alone, an image has another row")
        return graph, rows.shape[1:]

    def _remembered(self, release: str, key: list[Any], make: Callable[[], _Prepared]) -> _Prepared:
        """Return what was prepared for the same key: functions and models are compared by identity."""
        key = [(each.__func__, each.__self__) if isinstance(each, MethodType) else each for each in key]
        before = self._prepared.get(release)
        if before is None or not _same(before[0], key):
            before = key, make()
            self._prepared[release] = before
        return before[1]

    def _accelerated(self, performance: Performance | None, run: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        return run if performance is None else performance.accelerate(run)

    def _batch_size(self, performance: Performance | None) -> int:
        size = None if performance is None else performance.batch_size
        return size or (128 if self.device.type == "cpu" else 512)

    @property
    def _margin(self) -> float:
        """Of a bound: what the records of a unit, coming or going, can change by taking places."""
        return self._passes * PLACE_MARGIN * self._most

    def _open(self, facts: dict[str, Any]) -> None:
        """Write the first line, or check that a resumed ledger is for this very plan."""
        budget = self.plan.budget
        opening = {
            "epsilon": budget.epsilon if budget.private else None,
            "delta": budget.delta,
            "adjacency": budget.adjacency,
            "unit": budget.unit,
            "max_per_person": self._most if budget.unit == "person" else None,
            "plan": [self._event(release) for release in self.plan.releases],
            "account": None if self._account is None else self._account.path.name,
        }
        if clash := (opening.keys() | {"seq", "kind", "previous", "hash", "run"}) & facts.keys():
            raise ValueError(f"facts may not speak of {', '.join(sorted(clash))}: the plan does")
        opening |= facts
        if self.ledger.opening is None:
            self.ledger.append("open", run=self._new_run(), **opening)
        for field, value in opening.items():
            if digest((self.ledger.opening or {}).get(field)) != digest(value):
                raise LedgerError(
                    f"the ledger was opened with another {field}; resume with the same settings or start a new run"
                )

    def _new_run(self) -> str:
        """Return a name for this run, by which the data set's budget knows it."""
        return secrets.token_hex(16)

    def _event(self, release: Release) -> dict[str, Any]:
        """Return a release as ledger and certificate write it. Guarantee: all that epsilon depends on."""
        return {
            "name": release.name,
            "times": release.times,
            "sampling_prob": float(release.sampling_prob),
            "noise_multiplier": float(release.noise),
            "nonnegative": release.nonnegative,
            "noise": "secure" if self._secure(release) else "fast",
        }

    def _secure(self, release: Release) -> bool:
        """Exact discrete noise for releases made once; those made more often take the fast form."""
        return self.secure and release.times == 1

    def _planned(self, name: str) -> Release:
        try:
            return self.plan[name]
        except KeyError:
            names = ", ".join(r.name for r in self.plan.releases)
            raise BudgetExceeded(f"release {name!r} is not in the plan ({names}); nothing was spent on it") from None

    def _shares(self, given: Sequence[float], release: Release) -> list[float]:
        """Return a sampling probability for each class. Guarantee: plain numbers, none above the planned one."""
        shares = [float(share) for share in given]
        if len(shares) != len(self.classes) or not all(0 < share <= release.sampling_prob for share in shares):
            raise BudgetExceeded(
                f"release {release.name!r} needs a sampling probability for each of {len(self.classes)} classes, "
                f"above 0 and at most the planned {release.sampling_prob:g}"
            )
        if self.plan.budget.unit == "person" and len(set(shares)) > 1:
            raise BudgetExceeded("persons have one sampling probability: one may have images of several classes")
        return shares

    def __repr__(self) -> str:
        return f"Vault({len(self.classes)} classes, shape {tuple(self._images.shape[1:])})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a vault holds private images and cannot be copied or pickled")


class _VoidOnFailure:
    """Guarantee: where something fails on private images, the run's promise is void, on the disk, before that shows.

    For an error is an answer without noise: an operator can be made to fail on one image and on no other.
    """

    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, Exception):  # Ctrl-C tells of no image
            return
        reason = f"the computation failed on private images with {kind.__name__}"
        self._vault._void(reason)
        raise FailedOnPrivate(
            f"{reason}; what it said is not shown, as it could hold pixels. That it failed may tell of an image, so "
            "this run promises nothing any more: mend the cause (memory: smaller batches), and start a new run"
        ) from None


def _ones(images: torch.Tensor) -> torch.Tensor:
    return images.new_ones(len(images), 1)


def _same(a: Any, b: Any) -> bool:
    """Return whether two keys are the same; tensors, modules and functions by identity."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or (not callable(a) and type(a) is type(b) and bool(a == b))


def _like(each: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the tensor with as many axes as `other`."""
    return each.reshape(*each.shape, *(1 for _ in other.shape[each.ndim :]))


def _checked(labels: torch.Tensor | None, records: int, classes: int) -> torch.Tensor | None:
    """Return labels that name one class for each record. Guarantee: a record is in exactly one block of a sum."""
    if labels is None:
        if classes != 1:
            raise ValueError(f"there are {classes} classes but no labels")
        return None
    if labels.dtype != torch.int64 or labels.shape != (records,):
        raise ValueError("labels must be int64, one for each image")
    if records and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ValueError(f"labels must lie between 0 and {classes - 1}")
    return labels.detach().cpu().clone()


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Take convolutions whose derivatives come out the same each time."""
    if device.type != "cuda":
        yield
        return
    kept = torch.backends.cudnn
    with kept.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=kept.allow_tf32):
        yield
