"""The one door to private images.

A method gets a `Vault` and asks it for noised sums: `counts`, `sum`, `vectors` (and `gradient`, which the engine makes
of `vectors`). Each query goes the same way: is it in the plan → write the charge to the ledger and flush → compute each
record's vector by a traced graph → clip → weigh → sum → noise → keep → hand out. There is no way to ask for anything
else, except `unprotected`, which voids the guarantee first. What a method does with an answer is post-processing.

The guarantee hides one image, or one person: a person with m images is in a sample with all of them or none, and each
image's clipped vector has the weight 1/m, so that the person adds a vector of norm at most the bound, whatever the
classes are. Batches have one public size, filled up with zeros, and units stand in a fresh random order, so that one
more moves one other to other places, which costs `PLACE_MARGIN`. Proofs: docs/proofs.md, 1, 2, 4 and 6.
"""

from __future__ import annotations

import math
import secrets
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from sfumato.privacy.sampling import capped, poisson_sample, seated, standard_normals
from sfumato.privacy.tracing import TRIED, per_record, public_records, same_rows, trace, try_out

Function = Callable[..., Any]
GRID_STEPS = 2**20  # integer steps of the secure form per bound, times the square root of the dimension
PLACE_MARGIN = {"cpu": 1e-4, "cuda": 1e-3}  # of a bound; measured: 3e-5 and 1.7e-4 (docs/proofs.md, 4)
MAX_PER_PERSON = 1000
RESIDENT = 2**32  # bytes of images that may live on an accelerator


class FailedOnPrivate(RuntimeError):
    """Something failed on private images. What it said is not passed on: it could hold pixels."""


@dataclass(frozen=True)
class _Query:
    """A traced query: its sum over a batch, of (weights, what is shared, records); how far one unit moves the whole."""

    run: Callable[..., Tensor]
    rows: int
    width: int
    radius: float
    unit: float = 1.0


class Vault:
    """Private records behind noised queries, under a plan.

    - records: `images` uint8 or float [N, C, H, W], `labels` int64 [N] or None, public `classes`, `persons` if any.
    - plan: the releases to come, accounted. facts: for the ledger's first line (method, parameters, public facts).
    - ledger: where charges go; default: in memory.
    - kept: keeps noised results on disk (`keeping.py`), so that a killed run goes on; default: they are spent.
    - account: the data set's budget over many runs (`account.py`), from which the plan is reserved first.
    - secure: exact discrete noise for releases made once. max_per_person: public cap on a person's images in use.
    - performance: how to compute faster (`engine.Performance`). It is told neither noise nor budget.

    Guarantee: everything that leaves, except through `unprotected`, is the Gaussian mechanism on a Poisson sample with
    the noise and probability of its ledger line; all lines together are within the plan's budget.
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
        images = records.images.detach()
        self._images = images.to(self.device) if images.nbytes <= RESIDENT else images
        self._labels = _checked(records.labels, len(self._images), len(self.classes))
        self._seat_units(getattr(records, "persons", None), max_per_person)
        self._performance, self._passes, self._asking = performance, 1, threading.RLock()
        self._traces: dict[str, tuple[list[Any], list[Any], Any]] = {}
        self._open(facts or {})
        if self.ledger.taken:
            raise LedgerError("this ledger has a vault already, and two would share its charges; use one vault")
        self.ledger.taken = True
        self._kept = kept  # what was charged and not kept is spent: it may have been handed out
        self._asked = Counter({r.name: self.ledger.charged(r.name) if kept is None else 0 for r in plan.releases})
        if account is not None:
            account.reserve(self.ledger.entries[0]["run"], plan, (facts or {}).get("method"))
            if self.ledger.void:  # a kill may have come between the two
                account.void(self.ledger.entries[0]["run"], self.ledger.void)

    def counts(self, *, release: str = "counts") -> Tensor:
        """Return noisy numbers of units per class, [classes], unrounded; each image of a person counts its share."""
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
        """Return the noisy sum of `feature` rows, each clipped to `bound` in L2: [features], or [classes, features].

        `feature` maps a batch (pixels in [-1, 1], or what `map` made of them), its labels if `with_labels`, and the
        `constants`, to a row for each image. It is traced once for each function object; tensors that change from call
        to call are `constants`. Rows with a NaN or an infinity count as zero.

        Guarantee: adding or removing one unit moves the exact sum by at most `bound`, and by `PLACE_MARGIN` of it
        through the unit whose places it takes; noise of the planned multiplier times both makes the charged event.
        """
        planned = self._planned(release)
        if not isinstance(bound, int | float) or not 1e-30 < bound < 1e30:  # a tensor could carry a derivative
            raise ValueError(f"bound must be a number between 1e-30 and 1e30, got {bound!r}")
        shared = [each.detach() for each in constants]
        size = self._batch_size(self._performance) * (1 if self._passes == 1 else 8)  # mapped: most of the work is done
        key = [bound, by_class, with_labels, size, [each.shape for each in shared]]
        make = partial(self._sum_query, planned, shared, feature, bound, by_class, with_labels)
        query = self._remembered(release, (feature,), key, make)
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
        """Return the noisy sum of vectors in pieces, clipped by groups (`clipping.py`): [1 or classes, numbers].

        `function`, of `shared` tensors by name, a record's image, its label if `with_labels`, and standard normal
        numbers of its own in the shape `normals`, gives pieces. It is traced once for each function object. `by_class`,
        `shared` is stacked, [classes, ...]; a record gets its class's slice and moves that row only.

        Guarantee: adding or removing one unit moves the exact sum by at most the root of the sum of squared bounds,
        with margins for rounding by place and in float32 sums; noise of the planned multiplier times that goes on all
        numbers, which makes the charged event.
        """
        planned, faster = self._planned(release), performance or self._performance
        groups = [(float(bound), tuple(places)) for bound, places in groups]  # copies: nobody can change them later
        if not all(1e-30 < bound < 1e30 for bound, _ in groups) or self._secure(planned) or planned.nonnegative:
            raise ValueError(f"release {release!r}: vectors need plain bounds, fast noise (times > 1) and signs")
        lanes, size, values = len(self.classes) if by_class else 0, self._batch_size(faster), list(shared.values())
        key = [faster, str(groups), lanes, with_labels, normals, size, [each.shape for each in values]]
        make = partial(self._vector_query, function, dict(shared), groups, faster, lanes, with_labels, normals, size)
        query = self._remembered(release, (function,), key, make)
        return self._answer(planned, query, lambda: self._exact(planned, query, lanes or 1, size, values, normals))

    def map(self, transform: Function) -> Self:
        """Return a vault over the same records with a public row-wise `transform` applied once and kept in memory.

        Guarantee: nothing leaves; same ledger, same plan, same charges. Rounding by place can move records here, for
        good; sums of what is mapped have the margin of both passes.
        """
        graph, shape = self._traced(transform, (), False)
        home, size = self._images.device, self._batch_size(self._performance)

        def every() -> Tensor:
            kept = torch.zeros(len(self._images), *shape, device=home)
            for index in seated(self._chosen, self._persons, size).split(size) if self._units else ():
                rows = per_record(graph, 0, 1)(self._pixels(index)).float().to(home)
                kept[index[index >= 0].to(home)] = rows[(index >= 0).to(home)]
            return kept

        kept = self._void_on_failure(every)
        mapped = object.__new__(type(self))
        mapped.__dict__.update(self.__dict__)
        mapped._images, mapped._traces, mapped._passes = kept, {}, self._passes + 1
        return mapped

    def unprotected(self, reason: str) -> tuple[Tensor, Tensor | None]:
        """Return the raw images and labels. Guarantee: none, from here on, on the disk before this returns."""
        if not reason:
            raise ValueError("say why the raw images are needed; the certificate will show it")
        self._void(reason)
        return self._images, self._labels

    @property
    def asked(self) -> dict[str, int]:
        return dict(self._asked)  # how many results of each release were handed out in this run so far

    def skip(self, asked: Mapping[str, int]) -> None:
        """Go on after these results: a stored state holds what came of them. Guarantee: forward only."""
        self._asked |= Counter(asked)

    def forget(self) -> None:
        """Drop kept results of repeated releases: the caller has stored a state that they went into."""
        with self._asking:
            if self._kept is not None:
                self._kept.forget({r.name: self._asked[r.name] for r in self.plan.releases if r.times > 1})

    def _answer(self, release: Release, query: _Query, exact: Callable[[], Tensor]) -> Tensor:
        """Return the next result of a release: charge, compute, noise, keep; or the one that was kept.

        Guarantee: each result is charged before an image is read, and noised once for all before it leaves.
        """
        with self._asking:
            number = self._asked[release.name]
            kept: Tensor | None = None if self._kept is None else self._kept.get(release.name, number)
            if kept is None:
                self._charge(release, number)
            self._asked[release.name] += 1
        if kept is not None:
            return kept.to(self.device)
        total = self._void_on_failure(exact)
        noised = (self._noised(release, total, query.radius, self._secure(release)) * query.unit).float()
        with self._asking:
            if self._kept is not None:
                self._kept.put(release.name, number, noised)
        return noised

    def _charge(self, release: Release, number: int) -> None:
        """Pay for result `number`; long runs pay for a hundredth at a time.

        Guarantee: returns only when the charge is on the disk; raises `BudgetExceeded` rather than pass the plan.
        """
        self.ledger.check_open()
        charged = self.ledger.charged(release.name)
        if number >= charged:
            if charged >= release.times:
                raise BudgetExceeded(f"release {release.name!r} was charged all its {release.times} times: it is spent")
            block = min(release.times - charged, math.ceil(release.times / 100))
            self.ledger.append("charge", **{**self._event(release), "times": block})

    def _noised(self, release: Release, exact: Tensor, radius: float, secure: bool) -> Tensor:
        """Return the sum with its noise. Guarantee: the last place where the exact sum is seen."""
        if secure:
            return add_discrete_gaussian(exact.to(torch.int64), release.noise * radius).double()
        return add_gaussian(exact, release.noise * radius)

    def _exact(
        self, release: Release, query: _Query, lanes: int, size: int, shared: list[Tensor], normals: Any = ()
    ) -> Tensor:
        """Return the exact sum over a fresh Poisson sample, [rows, width], float64. Guarantee: for `_noised` only."""
        total = torch.zeros(query.rows, query.width, dtype=torch.float64, device=self.device)
        for records, weights in self._batches(self._drawn(release), lanes, size, normals) if self._units else ():
            total.add_(query.run(weights, *shared, *records).view_as(total))
        return total

    def _sum_query(
        self, release: Release, shared: list[Tensor], feature: Function, bound: float, by_class: bool, labelled: bool
    ) -> _Query:
        """Return a traced feature and how its rows are summed. Guarantee: no private record is read.

        In the secure form rows are cut to whole units towards zero, which cannot lengthen them; their norm is checked
        in whole numbers, and sums are exact: float64 holds integers below 2^53. A record at another place may be cut
        otherwise, by one unit in each entry.
        """
        graph, shape = self._traced(feature, shared, labelled)
        width, groups, secure = shape.numel(), len(self.classes) if by_class else 1, self._secure(release)
        steps = math.ceil(GRID_STEPS * math.sqrt(width))
        unit, radius = (bound / steps, steps + 1.0) if secure else (1.0, float(bound))

        def run(weights: Tensor, *given: Tensor) -> Tensor:
            constants, images, labels = given[: len(shared)], given[-2][0], given[-1][0]
            records = (images, labels) if labelled else (images,)
            rows = per_record(graph, len(shared), len(records))(*constants, *records).reshape(len(images), -1)
            rows = clip(rows, bound, unit, release.nonnegative) * weights[0, :, None]
            if secure:
                rows.masked_fill_(torch.linalg.vector_norm(rows.trunc_(), dim=1, keepdim=True) > radius, 0)
            return rows.sum(0, keepdim=True) if groups == 1 else nn.functional.one_hot(labels, groups).double().T @ rows

        moved = radius * (1 + self._margin) + (self._passes * self._most * math.sqrt(width) if secure else 0.0)
        return _Query(_accelerated(self._performance, run), groups, width, moved, unit)

    def _vector_query(
        self, function: Any, shared: Any, groups: Groups, fast: Any, lanes: int, labelled: bool, normals: Any, size: int
    ) -> _Query:
        """Return a traced function and how its pieces are clipped and summed. Guarantee: no private record is read."""
        tried = self._tried(labelled) + ([public_records(normals, self.device)] if normals else [])
        single = {name: value[0] for name, value in shared.items()} if lanes else shared
        with torch.no_grad():
            graph = trace(function, single, *(part[0] for part in tried), what="this loss")
            try_out(graph, [single], tried, "this loss")
            made = tree_map(lambda part: part[None], per_record(graph, 1, len(tried))(single, *tried))
            width = clipped_sum(made, groups, torch.ones(1, TRIED, device=self.device)).shape[1]

        def run(weights: Tensor, *given: Tensor) -> Tensor:
            every, (images, labels, *own) = dict(zip(shared, given, strict=False)), given[len(shared) :]
            records = (images, *((labels,) if labelled else ()), *own)
            each = per_record(graph, 1, len(records))
            if lanes > 1 and self.device.type != "cpu":
                return clipped_sum(torch.vmap(each, randomness="error")(every, *records), groups, weights)
            sums = []  # on a CPU networks take turns: side by side they would only be moved about
            for lane in range(lanes or 1):
                mine = {name: value[lane] for name, value in every.items()} if lanes else every
                made = tree_map(lambda part: part[None], each(mine, *(part[lane] for part in records)))
                sums.append(clipped_sum(made, groups, weights[lane : lane + 1]))
            return torch.cat(sums)

        radius = math.sqrt(math.fsum(bound**2 for bound, _ in groups))
        # In a batch, errors of 2^-24 of sums of at most `size` bounds come `size` times, at random; a unit more changes
        # those batches where its records are or those that it displaces. Batches are added up in float64.
        changed = 2 * (1 + 2 * self._most // size) * (lanes or 1) if self._most > 1 else 2
        radius *= 1 + self._margin + changed * math.sqrt(size) * size * 2.0**-24
        return _Query(_accelerated(fast, run), lanes or 1, width, radius)

    def _traced(self, feature: Function, constants: Sequence[Tensor], labelled: bool) -> tuple[Any, torch.Size]:
        """Return the graph of a feature and the shape of a row. Guarantee: no private record is read."""
        tried = self._tried(labelled)

        def one(*given: Tensor) -> Tensor:
            row: Tensor = feature(*(part[None] for part in given[len(constants) :]), *given[: len(constants)])
            if row.shape[:1] != (1,):
                raise ValueError(f"a feature must give one row per image, got {tuple(row.shape)} for one image")
            return row[0].detach()

        with torch.no_grad():
            together = feature(*(part.clone() for part in tried), *constants).detach()  # first: it may fill caches
            graph = trace(one, *constants, *(part[0] for part in tried))
            rows = try_out(graph, constants, tried, "this feature")[0]
        same_rows(rows, together, "this feature mixes the images of a batch: alone, an image has another row")
        return graph, rows.shape[1:]

    def _tried(self, labelled: bool) -> list[Tensor]:
        """Return public images, and labels if asked for, of the records' shape."""
        images = public_records(self._images.shape[1:], self.device)
        return [images, torch.arange(TRIED, device=self.device) % len(self.classes)][: 1 + labelled]

    def _remembered(self, name: str, held: tuple[Any, ...], key: list[Any], make: Callable[[], Any]) -> Any:
        """Return what was made for the same functions and models, compared by identity, and the same key."""
        parts = [part for each in held for part in (getattr(each, "__func__", each), getattr(each, "__self__", None))]
        known = self._traces.get(name)
        if known is None or known[1] != key or not all(a is b for a, b in zip(known[0], parts, strict=True)):
            known = self._traces[name] = parts, key, make()
        return known[2]

    def _seat_units(self, persons: Tensor | None, most: int) -> None:
        """Set who is a unit: `_chosen` records, `_unit_of` each, and `_weights`. Guarantee: module docstring, Units."""
        count = self._units = len(self._images)
        self._most, self._chosen, self._unit_of = 1, torch.arange(count), torch.arange(count)
        self._persons: Tensor | None = None
        self._weights = torch.ones(count, dtype=torch.float64)
        if self.plan.budget.unit == "image":
            return
        if persons is None or persons.shape != (count,) or type(most) is not int or most < 1:
            raise ValueError("the unit is a person: say whose each image is (persons), and use at least one of each")
        names, self._unit_of = persons.detach().cpu().unique(return_inverse=True)
        self._persons = self._unit_of
        self._most, self._units, self._chosen = most, len(names), capped(self._unit_of, most)
        self._weights = 1.0 / torch.bincount(self._unit_of[self._chosen], minlength=self._units)[self._unit_of].double()

    def _drawn(self, release: Release) -> Tensor:
        """Return which records are in this release. Guarantee: `poisson_sample` of units, afresh for every release."""
        sample = poisson_sample(self._units, release.sampling_prob)
        if self._persons is None:
            return sample
        there = torch.zeros(self._units, dtype=torch.bool)
        there[sample] = True
        return self._chosen[there[self._unit_of[self._chosen]]]

    def _batches(self, chosen: Tensor, lanes: int, size: int, normals: Any) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yield batches of records: ([images, labels, normals], weights), [lanes, size, ...]; one lane, or classes.

        Guarantee: shapes do not depend on the records; where there is none there are zeros, of weight zero.
        """
        labels = torch.zeros_like(self._unit_of) if self._labels is None else self._labels
        groups = [chosen] if lanes == 1 else [chosen[labels[chosen] == lane] for lane in range(lanes)]
        seats = [seated(group, self._persons, size) for group in groups]
        seats = [nn.functional.pad(row, (0, max(map(len, seats)) - len(row)), value=-1) for row in seats]
        for index in torch.stack(seats).split(size, 1):
            there, place = index >= 0, index.clamp_min(0)
            records = [self._pixels(index), torch.where(there, labels[place], 0).to(self.device)]
            if normals:
                records.append(self._normals(index, math.prod(normals)).reshape(lanes, size, *normals))
            yield records, torch.where(there, self._weights[place], 0.0).to(self.device)

    def _pixels(self, index: Tensor) -> Tensor:
        """Return images as float, uint8 in [-1, 1]; zeros for the index -1."""
        images: Tensor = self._images[index.clamp_min(0).to(self._images.device)].to(self.device)
        images = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float()
        empty = (index < 0).reshape(*index.shape, *(1 for _ in images.shape[index.ndim :]))
        return images.masked_fill_(empty.to(self.device), 0)

    def _normals(self, index: Tensor, count: int) -> Tensor:
        """Return random numbers of each record of a batch. Guarantee: independent of each other and everything else."""
        return standard_normals(index.numel(), count, self.device)

    def _open(self, facts: dict[str, Any]) -> None:
        """Write the first line, or check that a resumed ledger is for this very plan."""
        budget = self.plan.budget
        opening = {
            **{name: getattr(budget, name) for name in ("delta", "adjacency", "unit")},
            "epsilon": budget.epsilon if budget.private else None,
            "max_per_person": self._most if budget.unit == "person" else None,
            "plan": [self._event(release) for release in self.plan.releases],
            "account": None if self._account is None else self._account.path.name,
        }
        if clash := (opening.keys() | {"seq", "kind", "previous", "hash", "run"}) & facts.keys():
            raise ValueError(f"facts may not speak of {', '.join(sorted(clash))}: the plan does")
        if self.ledger.opening is None:
            self.ledger.append("open", run=self._new_run(), **opening, **facts)
        for field, value in {**opening, **facts}.items():
            if digest((self.ledger.opening or {}).get(field)) != digest(value):
                raise LedgerError(f"the ledger was opened with another {field}; resume with the same settings")

    def _new_run(self) -> str:
        return secrets.token_hex(16)  # by which the data set's budget knows this run

    def _event(self, release: Release) -> dict[str, Any]:
        """Return a release as ledger and certificate write it. Guarantee: all that epsilon depends on."""
        fields = ("name", "times", "sampling_prob", "noise_multiplier", "nonnegative")
        return {name: getattr(release, name) for name in fields} | {"noise": ["fast", "secure"][self._secure(release)]}

    def _secure(self, release: Release) -> bool:
        """Exact discrete noise for releases made once; those made more often take the fast form."""
        return self.secure and release.times == 1

    def _planned(self, name: str) -> Release:
        if name not in (names := [release.name for release in self.plan.releases]):
            raise BudgetExceeded(f"release {name!r} is not in the plan ({', '.join(names)}); nothing was spent on it")
        return self.plan[name]

    def _batch_size(self, performance: Any) -> int:
        return getattr(performance, "batch_size", None) or (128 if self.device.type == "cpu" else 512)

    @property
    def _margin(self) -> float:
        """Of a bound: what the one unit whose places another one takes can change, in each class at most."""
        return self._passes * PLACE_MARGIN.get(self.device.type, 1e-2) * math.sqrt(min(self._most, len(self.classes)))

    def _void(self, reason: str) -> None:
        """Guarantee: on the disk when this returns, for this run and for the data set's budget."""
        self.ledger.append("unprotected", reason=reason)
        if self._account is not None:
            self._account.void(self.ledger.entries[0]["run"], reason)

    def _void_on_failure(self, compute: Callable[[], Tensor]) -> Tensor:
        """Guarantee: where something fails on private images, the promise is void, on the disk, before that shows.

        For an error is an answer without noise: an operator can be made to fail on one image and on no other.
        """
        steady = {"benchmark": False, "deterministic": True, "allow_tf32": torch.backends.cudnn.allow_tf32}
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, **steady), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they, too, could tell of an image
            try:
                total = compute()
                if self.device.type != "cpu":
                    torch.accelerator.synchronize(self.device)  # a device tells of what failed when it is waited for
                return total
            except Exception as error:  # not Ctrl-C, which tells of no image
                failed = f"the computation failed on private images with {type(error).__name__}"
        self._void(failed)  # here the error and all that it holds is forgotten
        raise FailedOnPrivate(
            f"{failed}; what it said is not shown: it could hold pixels. That it failed may tell of an image, so this "
            "run promises nothing any more: mend the cause (memory: smaller batches), and start a new run"
        )

    def __repr__(self) -> str:
        return f"Vault({len(self.classes)} classes, shape {tuple(self._images.shape[1:])})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a vault holds private images and cannot be copied or pickled")


def _ones(images: Tensor) -> Tensor:
    return images.new_ones(len(images), 1)


def _accelerated(performance: Any, run: Function) -> Any:
    return run if performance is None else performance.accelerate(run)


def _checked(labels: Tensor | None, records: int, classes: int) -> Tensor | None:
    """Return labels that name one class for each record. Guarantee: a record is in exactly one block of a sum."""
    if labels is None and classes != 1:
        raise ValueError(f"there are {classes} classes but no labels")
    if labels is None:
        return None
    if labels.dtype != torch.int64 or labels.shape != (records,):
        raise ValueError("labels must be int64, one for each image")
    if records and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ValueError(f"labels must lie between 0 and {classes - 1}")
    return labels.detach().cpu().clone()
