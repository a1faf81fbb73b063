"""The one door to private images.

A method gets a `Vault` and asks it for noised sums. Each query goes the same way: is it in the plan and not
used up → write the charge to the ledger and flush → clip each record's row → sum → noise → hand out. There is
no way to ask for anything else, except `unprotected`, which voids the guarantee first.

What a method may do with an answer is unlimited: it is post-processing.

Queries: `counts`, `sum`. The third kind, `gradient` (per-example clipped gradients, `gradients.py`), belongs
beside them and is the same query with another row: it calls `_charge`, then `_noised`.

**A probability per class.** A sum may draw each class with a probability q_c of its own, none above the planned q, and
is charged for q. That is enough: to draw with q_c is to draw with q and to keep with probability t = q_c / q. So with
P and Q the outputs of the plain query with q on neighbouring sets, and O on the set without the record in question,
the outputs are (1 - t) O + t P and (1 - t') O + t' Q: a mixture of the pairs (P, Q), (P, O), (O, Q) and (O, O). The
hockey-stick divergence is jointly convex, and each pair's is at most that of the accounted pair, since adding or
removing a record is what is charged (under replace-one: is replacing it by a row of zeros). So is the mixture's.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from sfumato.privacy.accounting import Plan, Release, calibrate
from sfumato.privacy.budget import Budget, BudgetExceeded
from sfumato.privacy.ledger import Ledger, LedgerError, digest
from sfumato.privacy.mechanisms import add_discrete_gaussian, add_gaussian
from sfumato.privacy.sampling import poisson_sample, shuffled

Feature = Callable[..., torch.Tensor]  # of images, or of images and labels, to a row for each

PLACE_MARGIN = 4e-3  # of a bound: by which a row may come out otherwise at another place of a batch, by rounding
GRID_STEPS = 2**16  # integer steps of the secure form per bound, times the square root of the dimension
PROBES = 6  # public images on which a feature map is tried
MARGIN = 1e-2  # relative, between an image's row alone and in company: a mistake shows, rounding does not
REPEAT_MARGIN = 1e-5  # relative, between a row and the same row again
SIZES = 4  # of batches, times six
PLAIN = 0.37  # pixels of a public image without anything on it
BATCH_SIZE, DEVICE_BATCH_SIZE = 128, 512
MAPPED = 8  # times as many records in a batch when most of the work on them is done
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
class Query:
    """What is summed and how: the feature, its release and bound, and the width that it has shown."""

    feature: Feature
    release: Release
    bound: float
    width: int
    by_class: bool
    with_labels: bool
    secure: bool
    shares: list[float] | None


class Vault:
    """Private records behind noised queries, under a plan and its budget.

    `releases` is the plan: noise that it leaves open is calibrated to `budget` here, from public facts alone.
    `facts` is written to the ledger's first line (method, parameters, public facts).
    `keep` is a folder for noised results, so that a resumed run need not pay for them again.

    Guarantee: everything that leaves, except through `unprotected`, is the Gaussian mechanism on a
    Poisson sample with the noise and at most the probability of its ledger line; the composition of all lines is within
    `budget`, checked before an image is read. Image shape, class names and the number of classes are public.
    """

    def __init__(
        self,
        records: Records,
        budget: Budget,
        releases: Sequence[Release],
        *,
        ledger: Ledger | None = None,
        facts: dict[str, Any] | None = None,
        keep: Path | None = None,
        device: str | torch.device = "cpu",
        secure: bool = True,
        batch_size: int | None = None,
    ) -> None:
        self.plan: Plan = calibrate(releases, budget)
        self.classes = tuple(records.classes)
        self.device = torch.device(device)
        self.secure = secure
        self.ledger = ledger if ledger is not None else Ledger()
        self._images = records.images.detach()
        if self._images.nbytes <= RESIDENT:
            self._images = self._images.to(self.device)
        self._labels = _checked(records.labels, len(self._images), len(self.classes))
        self._classes_there = None if self._labels is None else self._labels.to(self.device)
        self._keep = keep
        self._batch_size = batch_size or (BATCH_SIZE if self.device.type == "cpu" else DEVICE_BATCH_SIZE)
        self._reserved: dict[str, int] = {}
        self._widths: dict[str, int] = {}
        self._turns = itertools.count()
        self._public: torch.Tensor | None = None
        self._passes = 1
        self._open(facts or {})

    # -- queries ------------------------------------------------------------------------------------------

    def counts(self, *, release: str = "counts") -> torch.Tensor:
        """Noisy images per class, [classes], unrounded and possibly negative.

        Guarantee: a sum of one-hot rows, norm 1; the Gaussian mechanism with the plan's noise.
        """
        one = torch.ones(1, device=self.device)
        return self.sum(lambda images: one.expand(len(images), 1), release=release, bound=1.0, by_class=True)[:, 0]

    def sum(
        self,
        feature: Feature,
        *,
        release: str,
        bound: float,
        by_class: bool = False,
        with_labels: bool = False,
        noise_multiplier: float | None = None,
        sampling_prob: float | Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Noisy sum of `feature` rows, each clipped to `bound` in L2: [features], or [classes, features].

        `feature` maps a batch (pixels in [-1, 1], or what `map` made of them) to one row per image; `with_labels` it is
        given the images' labels, too. The sum is over a fresh Poisson sample. Noise and sampling come from the plan; if
        given, they must agree with it, or be a probability for each class that is not above the planned one.
        Rows with a NaN or an infinity count as zero.

        Guarantee: adding or removing one record moves the exact sum by at most `bound`, and by `PLACE_MARGIN` of it
        through the one record whose place it takes; noise of standard deviation `noise_multiplier` times both makes the
        charged event. With `by_class` a record touches its own row only, so the
        whole matrix has that same bound, and replacing a record moves two rows by a bound each.
        """
        single = sampling_prob if isinstance(sampling_prob, int | float) else None
        planned = self._planned(release, noise_multiplier, single)
        shares = None if sampling_prob is None or single is not None else self._shares(sampling_prob, planned)
        if not isinstance(bound, int | float) or not 1e-30 < bound < 1e30:  # a tensor could carry a derivative
            raise ValueError(f"bound must be a number between 1e-30 and 1e30, got {bound!r}")
        question = {"bound": float(bound), "by_class": by_class}
        if (kept := self._kept(planned, question)) is not None:
            return kept
        width = self._width(feature, planned, with_labels)
        secure = self._secure(planned)
        self._charge(planned)
        query = Query(feature, planned, float(bound), width, by_class, with_labels, secure, shares)
        exact, unit, radius = self._exact_sum(query)
        return self._keep_result(planned, question, self._noised(planned, exact, radius, secure) * unit)

    def map(self, transform: Feature) -> Vault:
        """A vault over the same records with a public row-wise `transform` applied once and kept in memory.

        Guarantee: nothing leaves; same ledger, same plan, same reservations. Rounding by place (`_rows`) can move a
        second record here, for good; sums of what is mapped have twice the margin.
        """
        shape = self._row_shape(transform)
        home = self._images.device
        kept = torch.zeros(self._size, *shape, device=home)
        for index, rows in self._rows(transform, torch.arange(self._size)):
            if rows.shape[1:] != shape:
                raise ValueError(f"rows are {tuple(rows.shape[1:])}, {tuple(shape)} on random images")
            kept[index.to(home)] = rows.float().to(home)
        mapped = object.__new__(type(self))
        mapped.__dict__.update(self.__dict__)
        mapped._images, mapped._widths = kept, {}
        mapped._batch_size, mapped._passes = MAPPED * self._batch_size, self._passes + 1
        return mapped

    def remaining(self, release: str) -> int:
        """How many releases of that name can still be had. Guarantee: depends on the ledger only."""
        planned = self._planned(release, None, None)
        return planned.times - self.ledger.charged(release) + self._reserved.get(release, 0)

    def unprotected(self, reason: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The raw images and labels.

        Guarantee: none, from here on and for good; that is on the disk before this returns.
        """
        if not reason:
            raise ValueError("say why the raw images are needed; the certificate will show it")
        self.ledger.append("unprotected", reason=reason)
        return self._images, self._labels

    # -- the steps of a query -----------------------------------------------------------------------------

    def _charge(self, release: Release) -> None:
        """Pays for one release; long runs pay for a hundredth at a time and use that up first.

        Guarantee: returns only when the charge is on the disk; raises `BudgetExceeded` rather than pass the plan.
        """
        self.ledger.check_open()  # before the lock too: a fork may have copied it locked
        with self.ledger.spending:
            self.ledger.check_open()
            self._reserve(release)
            self._reserved[release.name] -= 1

    def _reserve(self, release: Release) -> None:
        """Guarantee: at least one release of this name is paid for and unused when this returns."""
        if self._reserved.get(release.name, 0) < 1:
            left = release.times - self.ledger.charged(release.name)
            if left <= 0:
                raise BudgetExceeded(
                    f"release {release.name!r} was charged all its {release.times} times: the budget is spent"
                )
            block = min(left, math.ceil(release.times / 100))
            self.ledger.append("charge", **{**self._event(release), "times": block})
            self._reserved[release.name] = block

    def _exact_sum(self, query: Query) -> tuple[torch.Tensor, float, float]:
        """(sum of clipped rows in units, the unit, the bound in units).

        Guarantee: one record changes the sum by at most that many units in L2, of which a margin is for the one record
        that it displaces (`_rows`). In the secure form rows are cut to whole units towards zero, which cannot lengthen
        them; their norm is checked in whole numbers, and sums are exact: float64 holds integers below 2^53, and a row's
        entries stay below 2^17 sqrt(features).
        """
        bound, width = query.bound, query.width
        steps = math.ceil(GRID_STEPS * math.sqrt(width))
        unit, radius = (bound / steps, float(steps + 1)) if query.secure else (1.0, bound)
        groups = len(self.classes) if query.by_class else 1
        total = torch.zeros(groups, width, dtype=torch.float64, device=self.device)
        drawn = self._drawn(query.release, query.shares)
        for index, made in self._rows(query.feature, drawn, query.with_labels):
            rows = made.reshape(len(index), -1)
            if rows.shape[1] != width:
                raise ValueError(
                    f"release {query.release.name!r}: rows are {rows.shape[1]} wide, {width} on random images"
                )
            rows = _clip(rows, bound, unit, query.release.nonnegative)
            if query.secure:
                long = torch.linalg.vector_norm(rows.trunc_(), dim=1, keepdim=True) > radius
                rows.masked_fill_(long, 0)  # none is: rows are within `steps` but for rounding, far below one
            total += self._membership(index, groups).T @ rows
        radius = radius * (1 + self._passes * PLACE_MARGIN) + (
            math.sqrt(width) if query.secure else 0.0
        )  # it is cut to units, too
        return (total if query.by_class else total[0]), unit, radius

    def _noised(self, release: Release, exact: torch.Tensor, radius: float, secure: bool) -> torch.Tensor:
        """The sum with its noise. Guarantee: the last place where the exact sum is seen."""
        scale = release.noise * radius
        if secure:
            return add_discrete_gaussian(exact.to(torch.int64), scale).double()
        return add_gaussian(exact, scale)

    def _event(self, release: Release) -> dict[str, Any]:
        """A release as ledger and certificate write it. Guarantee: all that epsilon depends on."""
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

    # -- kept results -------------------------------------------------------------------------------------

    def _keep_result(self, release: Release, question: dict[str, Any], noised: torch.Tensor) -> torch.Tensor:
        """Stores what is public by now. Guarantee: never the exact sum; a crash before this loses the result only."""
        result = noised.detach().float().contiguous()
        if self._keep is not None and release.times == 1:
            self._keep.mkdir(parents=True, exist_ok=True)
            target = self._keep / f"{release.name}.safetensors"
            partial = target.with_suffix(".partial")
            save_file({"release": result.cpu()}, partial)
            os.replace(partial, target)
            sha256 = hashlib.sha256(target.read_bytes()).hexdigest()
            self.ledger.append("kept", name=release.name, sha256=sha256, **question)
        return result

    def _kept(self, release: Release, question: dict[str, Any]) -> torch.Tensor | None:
        """A noised result from before a restart. Guarantee: paid for once, and exactly what was stored."""
        if self._keep is None or release.times != 1 or not self.ledger.charged(release.name):
            return None
        line = self.ledger.kept(release.name)
        target = self._keep / f"{release.name}.safetensors"
        if line is None or not target.exists():
            raise BudgetExceeded(
                f"release {release.name!r} was charged, then lost in a crash: its budget is spent. "
                "Start a new run; the images have then been charged by both ledgers."
            )
        if any(line.get(name) != value for name, value in question.items()):
            raise BudgetExceeded(f"release {release.name!r} was spent on another question; it cannot be asked again")
        if hashlib.sha256(target.read_bytes()).hexdigest() != line["sha256"]:
            raise LedgerError(f"{target} is not what was stored; start a new run")
        return load_file(target)["release"].to(self.device)

    # -- checks that cost nothing -------------------------------------------------------------------------

    def _open(self, facts: dict[str, Any]) -> None:
        """Writes the first line, or checks that a resumed ledger is for this very plan."""
        budget = self.plan.budget
        opening = {
            "epsilon": budget.epsilon if budget.private else None,
            "delta": budget.delta,
            "adjacency": budget.adjacency,
            "plan": [self._event(release) for release in self.plan.releases],
        }
        if clash := (opening.keys() | {"seq", "kind", "previous", "hash"}) & facts.keys():
            raise ValueError(f"facts may not speak of {', '.join(sorted(clash))}: the plan does")
        opening |= facts
        if self.ledger.opening is None:
            self.ledger.append("open", **opening)
            return
        for field, value in opening.items():
            if digest(self.ledger.opening.get(field)) != digest(value):
                raise LedgerError(
                    f"the ledger was opened with another {field}; resume with the same settings or start a new run"
                )

    def _planned(self, name: str, noise: float | None, sampling: float | None) -> Release:
        try:
            release = self.plan[name]
        except KeyError:
            names = ", ".join(r.name for r in self.plan.releases)
            raise BudgetExceeded(f"release {name!r} is not in the plan ({names}); nothing was spent on it") from None
        for asked, planned, what in (
            (noise, release.noise, "noise_multiplier"),
            (sampling, release.sampling_prob, "sampling_prob"),
        ):
            if asked is not None and asked != planned:
                raise BudgetExceeded(f"release {name!r}: {what} {asked} was asked for, {planned} was planned")
        return release

    def _shares(self, given: Any, release: Release) -> list[float]:
        """A sampling probability for each class. Guarantee: plain numbers, none above the planned one."""
        shares = [float(share) for share in given] if isinstance(given, list | tuple) else []
        if len(shares) != len(self.classes) or not all(0 < share <= release.sampling_prob for share in shares):
            raise BudgetExceeded(
                f"release {release.name!r} needs a sampling probability for each of {len(self.classes)} classes, "
                f"above 0 and at most the planned {release.sampling_prob:g}"
            )
        return shares

    def _width(self, feature: Feature, release: Release, with_labels: bool) -> int:
        """Length of a row, tried out on public images whenever a block of releases is begun."""
        if self._reserved.get(release.name, 0) < 1 or release.name not in self._widths:
            self._widths[release.name] = self._row_shape(feature, with_labels).numel()
        return self._widths[release.name]

    def _row_shape(self, feature: Feature, with_labels: bool = False) -> torch.Size:
        """Shape of a row, once `feature` has been tried on public images.

        Rows are computed one by one whatever `feature` is (`_apply`); here is where somebody who thought otherwise is
        told so: one who mixes a batch, draws randomness, or keeps a memory of what went before.

        Guarantee: no private record is read.
        """
        images, count = self._probes(), self._tried
        labels = torch.arange(count, device=self.device) % len(self.classes) if with_labels else None
        try:
            turn = next(self._turns)
            one, same = (self._apply(feature, images, labels, turn)[0] for _ in range(2))
            turned = None if labels is None else labels.flip(0)
            moved = self._apply(feature, images.flip(0), turned, next(self._turns))[0].flip(0)
            with torch.no_grad():
                together = feature(*(tensor.clone() for tensor in (images, labels) if tensor is not None)).detach()
        except RuntimeError as error:
            raise ValueError(
                "this feature map cannot be applied to images one by one (batch norm in training mode, randomness, a "
                f"decision that depends on pixels, a tensor kept from an earlier call?): {error}"
            ) from None
        if not one.isfinite().all():
            raise ValueError("this feature map gives NaN or infinity on random images; it cannot be checked")
        if not one.shape == moved.shape == together.shape:
            raise ValueError(
                f"a feature map must give one row per image, got {tuple(together.shape)} for {count} images"
            )
        largest = float(one.double().abs().max())
        if not torch.allclose(one.double(), same.double(), 0.0, REPEAT_MARGIN * largest):
            raise ValueError(
                "this feature map gives another row when it is asked again: it counts its calls, or a network in it is "
                "in training mode. How often it is called depends on how many images there are, so that must not show"
            )
        for other in (moved, together):
            if not torch.allclose(one.double(), other.double(), MARGIN, MARGIN * largest):
                raise ValueError(
                    "this feature map mixes the images of a batch, or remembers others: alone, an image has another "
                    "row. Rows are computed one by one here, so that one image's influence is bounded. (Or it makes "
                    "rounding errors large: does it normalise what is zero for a plain image?)"
                )
        lengths, apart = (torch.linalg.vector_norm(t.double().reshape(count, -1), dim=1) for t in (one, one - moved))
        if float(apart.max()) > PLACE_MARGIN * float(lengths.max()):
            raise ValueError(
                "this feature map makes rounding errors large: the row of an image depends on its place in a batch. "
                "Does it normalise what is zero for a plain image? Add a small constant to what it divides by"
            )
        return one.shape[1:]

    # -- private parts ------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return len(self._images)

    @property
    def _tried(self) -> int:
        """How many public images a feature is tried on: one of each class at least."""
        return max(PROBES, len(self.classes))

    def _probes(self) -> torch.Tensor:
        """Public images: one that is plain, then some that look like noise.

        Guarantee: fixed numbers (multiples of the golden ratio), no record.
        """
        if self._public is None or self._public.shape[1:] != self._images.shape[1:]:
            shape = (self._tried, *self._images.shape[1:])
            spread = torch.arange(math.prod(shape), dtype=torch.float64) * ((math.sqrt(5) - 1) / 2) % 1
            images = spread.reshape(shape) * 2 - 1
            images[0] = PLAIN
            self._public = images.float().to(self.device)
        return self._public

    def _drawn(self, release: Release, shares: list[float] | None) -> torch.Tensor:
        """Which records are in this release. Guarantee: `poisson_sample`, afresh for every release."""
        if shares is None or self._labels is None:
            return poisson_sample(self._size, release.sampling_prob if shares is None else shares[0])
        return poisson_sample(self._size, np.array(shares)[self._labels.numpy()])

    def _batches(self, index: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(index, self._batch_size) if len(index) else ()

    def _batch(self, index: torch.Tensor) -> torch.Tensor:
        images = self._images[index.to(self._images.device)].to(self.device)
        return images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float()

    def _rows(
        self, feature: Feature, chosen: torch.Tensor, with_labels: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batch by batch the indices of the chosen records and their rows, one for each, cut off from derivatives.

        Guarantee: what a feature says when it fails is not passed on: it could hold pixels. Records come in a fresh
        random order. So if a device rounds by place in a batch, one record more still moves only one other record: a
        random order of n + 1 is one of n with the new record at a random place and whoever stood there at the end.
        """
        turn, failure = next(self._turns), ""
        first: torch.Tensor | None = None
        changed = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, index in enumerate(self._batches(shuffled(chosen))):
            labels = self._labels_of(index) if with_labels else None
            try:
                rows, witness = self._apply(feature, self._batch(index), labels, turn, number)
            except Exception as error:
                failure = type(error).__name__
            if failure:  # raised here, where the error is forgotten: it would be kept as the context otherwise
                raise RuntimeError(
                    f"the feature map failed on private images with a {failure}; what it said is not shown, as it "
                    "could hold pixels. It worked on public ones: does it depend on the values?"
                )
            first = witness if first is None else first
            apart, length = (torch.linalg.vector_norm(t.double()) for t in (witness - first, first))
            changed = torch.maximum(changed, apart / length.clamp_min(1e-30))
            yield index, rows
        if not changed <= PLACE_MARGIN:  # after the last batch, when nothing has left yet
            raise RuntimeError(
                "the feature map gave a public image another row in a later batch: it changes from call to call, and "
                "how often it is called depends on how many images there are. What was paid for this sum is spent"
            )

    def _apply(
        self, feature: Feature, images: torch.Tensor, labels: torch.Tensor | None, turn: int, number: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`feature` of each image of a batch by itself, and of a public image among them, always the same.

        `turn` numbers the passes over images, `number` the batches of a pass.

        Guarantee: a row is computed from its own image and label. The feature runs under `torch.vmap`: what it is given
        is one image, a batch of one, and no operation in it, however deep, reaches another; randomness and decisions
        that depend on pixels are errors. So is a tensor that it kept from the call before, whether it computes with it
        or returns it, since batches are filled up with public images to sizes that change from call to call; one kept
        for longer meets the public image and shows there (`_rows`), as does what changes within a pass. (What a feature
        hides from PyTorch, it can mix; how often it is called tells how many images there are, to the batch; and what
        changes between two passes only is not seen.)

        Sizes do not depend on the records, so that these do not change the shapes that the device computes with, nor
        the way it rounds, except as far as it rounds by place: the margin is for that.
        """

        def alone(*one: torch.Tensor) -> torch.Tensor:
            row = feature(*(part[None] for part in one))
            if row.shape[:1] != (1,):
                raise ValueError(f"a feature map must give one row per image, got {tuple(row.shape)} for one image")
            return row[0].detach()

        varied = 2 * random.Random(turn).randrange(SIZES) + turn % 2
        size = max(self._batch_size, self._tried) + 1 + 3 * varied + number % 3
        # The public image stands at a place that changes, too: whoever stood there is at the end.
        place = random.Random(f"{turn} {number}").randrange(self._batch_size)
        order = torch.arange(size, device=self.device)
        order[place], order[-1] = size - 1, place
        inputs = [_filled(images, size, self._probes()[-1])[order]]
        if labels is not None:
            inputs.append(_filled(labels, size, labels.new_zeros(()))[order])
        with torch.no_grad():
            rows = torch.vmap(alone, randomness="error")(*inputs).detach()
        if len(rows) != size:
            raise RuntimeError(f"a feature map must give rows of the images at hand, got {len(rows)} for {size}")
        return rows[order[: len(images)]], rows[place]

    def _labels_of(self, index: torch.Tensor) -> torch.Tensor:
        """Classes of these records; without labels there is the one."""
        if self._classes_there is None:
            return torch.zeros(len(index), dtype=torch.int64, device=self.device)
        return self._classes_there[index.to(self.device)]

    def _membership(self, index: torch.Tensor, groups: int) -> torch.Tensor:
        """One-hot classes, [records, groups]; without groups everything is in the one group."""
        if groups == 1:
            return torch.ones(len(index), 1, dtype=torch.float64, device=self.device)
        return torch.nn.functional.one_hot(self._labels_of(index), groups).double()

    def __repr__(self) -> str:
        return f"Vault({len(self.classes)} classes, shape {tuple(self._images.shape[1:])})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a vault holds private images and cannot be copied or pickled")


def _checked(labels: torch.Tensor | None, records: int, classes: int) -> torch.Tensor | None:
    """Labels that name one class for each record. Guarantee: a record belongs to exactly one block of a sum."""
    if labels is None:
        if classes != 1:
            raise ValueError(f"there are {classes} classes but no labels")
        return None
    if labels.dtype != torch.int64 or labels.shape != (records,):
        raise ValueError("labels must be int64, one for each image")
    if records and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ValueError(f"labels must lie between 0 and {classes - 1}")
    return labels.detach().cpu().clone()


def _filled(tensor: torch.Tensor, count: int, filler: torch.Tensor) -> torch.Tensor:
    """The tensor with copies of a public entry after it, `count` entries in all."""
    return torch.cat([tensor, filler.to(tensor).expand(count - len(tensor), *tensor.shape[1:])])


def _clip(rows: torch.Tensor, bound: float, unit: float, nonnegative: bool) -> torch.Tensor:
    """A copy of the rows in float64 and in units of `unit`; rows that are not finite become zero.

    Guarantee: each output row depends on its input row alone, has L2 norm at most `bound / unit`, and no negative
    entry if `nonnegative`.
    """
    rows = rows.to(torch.float64, copy=True)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    rows.masked_fill_(~norms.isfinite(), 0)  # a NaN or an infinity anywhere makes the norm one
    if nonnegative:
        norms = torch.linalg.vector_norm(rows.clamp_min_(0), dim=1, keepdim=True)
    return rows.mul_(bound / unit / norms.nan_to_num(nan=bound, posinf=bound).clamp_min(bound))
