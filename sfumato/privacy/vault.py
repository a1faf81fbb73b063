"""The one door to private images.

A method gets a `Vault` and asks it for noised sums. Each query goes the same way: is it in the plan and not
used up → write the charge to the ledger and flush → clip each record's row → sum → noise → hand out. There is
no way to ask for anything else, except `unprotected`, which voids the guarantee first.

What a method may do with an answer is unlimited: it is post-processing.

Queries: `counts`, `sum`, and `gradient`, which is a sum of per-example clipped gradients (`gradients.py`).

**A probability per class.** A sum may draw each class with a probability q_c of its own, none above the planned q, and
is charged for q. That is enough: to draw with q_c is to draw with q and to keep with probability t = q_c / q. So with
P and Q the outputs of the plain query with q on neighbouring sets, and O on the set without the record in question,
the outputs are (1 - t) O + t P and (1 - t') O + t' Q: a mixture of the pairs (P, Q), (P, O), (O, Q) and (O, O). The
hockey-stick divergence is jointly convex, and each pair's is at most that of the accounted pair, since adding or
removing a record is what is charged (under replace-one: is replacing it by a row of zeros). So is the mixture's.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sfumato.privacy.accounting import Plan, Release, calibrate
from sfumato.privacy.budget import Budget, BudgetExceeded
from sfumato.privacy.gradients import Gradients, Loss
from sfumato.privacy.ledger import Ledger, LedgerError, digest
from sfumato.privacy.mechanisms import add_discrete_gaussian, add_gaussian
from sfumato.privacy.recording import RECORD_AFTER, Recorded
from sfumato.privacy.rows import PLACE_MARGIN, FailedOnPrivate, Feature, Records, Rows
from sfumato.privacy.sampling import poisson_sample

GRID_STEPS = 2**16  # integer steps of the secure form per bound, times the square root of the dimension
MAPPED = 8  # times as many records in a batch when most of the work on them is done


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


class Vault(Rows):
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
        self.plan: Plan = calibrate(releases, budget)  # first: a plan that is refused costs no look at an image
        super().__init__(records, device, batch_size)
        self.secure = secure
        self.ledger = ledger if ledger is not None else Ledger()
        self._keep = keep
        self._reserved: dict[str, int] = {}
        self._widths: dict[str, int] = {}
        self._rules: dict[str, tuple[Any, ...]] = {}
        self._recordings: dict[str, tuple[Any, ...]] = {}
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
        with self._told():
            exact, unit, radius = self._exact_sum(query)
        return self._keep_result(planned, question, self._noised(planned, exact, radius, secure) * unit)

    def gradient(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        release: str,
        bound: float | Mapping[str, float],
        by_class: bool = False,
        with_labels: bool = False,
        views: int = 1,
        draws: int = 0,
        precision: torch.dtype = torch.float32,
        at_once: int | None = None,
        record: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Noisy sum of per-example gradients, each clipped in L2, by the names and in the shapes of the parameters.

        `loss(model, images, [labels], [normals])` gives one number per image. The gradients of trainable parameters
        are clipped together to `bound`, or by groups to a bound each (`{"encoder": 1.0, "flow": 0.1}`: beginnings of
        names). `by_class`, the parameters are stacked, [classes, ...] (`nets/stacked.py`): an image goes through its
        class's network, which is what the loss gets, and moves that slice only. Each image is evaluated `views` times,
        each time with `draws` standard normal numbers of its own, [images, draws]; the gradient of the mean is clipped.
        `precision` is that of the network (bfloat16: by autocast); clipping and sums have float32 at least. `at_once`
        bounds memory, whatever sample is drawn: so many images (of each class) at a time. `record`: on a GPU, what the
        loss does is recorded at the first call and replayed afterwards, in a fraction of the time; then only the values
        of parameters may change between calls, in place, and nothing that Python decides. The caller divides by public
        numbers and takes the step.

        Guarantee: adding or removing one record moves the exact sum by at most the root of the sum of squared bounds,
        with margins for rounding by place and in sums; noise of `noise_multiplier` times that goes on all parameters,
        which makes the charged event. See `gradients.py` for why that holds whatever the loss is.
        """
        planned = self._planned(release, None, None)
        if self._secure(planned) or planned.nonnegative:
            raise ValueError(f"release {release!r}: gradients need fast noise (times > 1, or secure=False) and signs")
        if at_once is not None and at_once < 1:
            raise ValueError(f"at_once must be a number of images, got {at_once}")
        if views < 1 or draws < 0 or (views > 1 and not draws):
            raise ValueError(f"{views} views with {draws} random numbers each: views must differ by something")
        records = at_once or self._batch_size
        engine = Gradients(
            model,
            loss,
            bound,
            classes=len(self.classes) if by_class else None,
            views=views,
            precision=precision,
            device=self.device,
        )
        if self._rules.get(release, (None,))[0] != engine.structure:
            engine.try_out(self._public_inputs(engine.lanes, with_labels, views, draws))
            self._rules[release] = engine.structure, engine.calls
        engine.calls = self._rules[release][1]
        if record and self._replays:
            engine.recorded = self._recording(release, engine, records, with_labels, views, draws)
        self._charge(planned)
        given = (by_class, records, with_labels, views, draws, engine.recorded is None)
        with self._told():
            exact = engine.sum(self._seated(self._drawn(planned, None), *given))
        radius = engine.radius * (1 + self._passes * engine.margin + engine.rounding(records))
        return engine.named(self._noised(planned, exact, radius, False).detach().float())

    @property
    def _replays(self) -> bool:
        """Whether there are recordings on this device."""
        return self.device.type == "cuda"

    def _recording(
        self, release: str, engine: Gradients, records: int, with_labels: bool, views: int, draws: int
    ) -> Recorded | None:
        """What the engine does to a batch, recorded now or before; None where that cannot be recorded.

        Guarantee: no private record is read.
        """
        key = (engine.structure, engine.frozen, records, with_labels, views, draws)
        if self._recordings.get(release, (None,))[0] != key:
            self._recordings.pop(release, None)  # first: it takes memory
            size = self._arrangement(0, 0, records, varied=False)[0]
            tried = self._public_inputs(engine.lanes, with_labels, views, draws)
            chosen = torch.arange(size + RECORD_AFTER, device=self.device)
            inputs = [part[:, chosen % part.shape[1]] for part in tried]
            try:
                recorded: Recorded | None = Recorded(engine, inputs, size)
            except RuntimeError as error:
                warnings.warn(f"this loss cannot be recorded, so that it is slower: {error}", stacklevel=3)
                recorded = None
            self._recordings[release] = key, recorded
        found: Recorded | None = self._recordings[release][1]
        return found

    def map(self, transform: Feature) -> Vault:
        """A vault over the same records with a public row-wise `transform` applied once and kept in memory.

        Guarantee: nothing leaves; same ledger, same plan, same reservations. Rounding by place (`_rows`) can move a
        second record here, for good; sums of what is mapped have twice the margin.
        """
        shape = self._row_shape(transform)
        home = self._images.device
        kept = torch.zeros(self._size, *shape, device=home)
        with self._told():
            for index, rows in self._rows(transform, torch.arange(self._size)):
                if rows.shape[1:] != shape:
                    raise ValueError(f"rows are {tuple(rows.shape[1:])}, {tuple(shape)} on random images")
                kept[index.to(home)] = rows.float().to(home)
        mapped = object.__new__(type(self))
        mapped.__dict__.update(self.__dict__)
        mapped._images, mapped._widths, mapped._rules, mapped._recordings = kept, {}, {}, {}
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

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Guarantee: where code fails on private images, the run's promise is void, on the disk, before that shows.

        For an error is an answer without noise: code can be made to fail on one image and on no other.
        """
        try:
            yield
        except FailedOnPrivate as error:
            self.ledger.append("unprotected", reason=str(error).split(";")[0])
            raise

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

    def _drawn(self, release: Release, shares: list[float] | None) -> torch.Tensor:
        """Which records are in this release. Guarantee: `poisson_sample`, afresh for every release."""
        if shares is None or self._labels is None:
            return poisson_sample(self._size, release.sampling_prob if shares is None else shares[0])
        return poisson_sample(self._size, np.array(shares)[self._labels.numpy()])

    def __repr__(self) -> str:
        return f"Vault({len(self.classes)} classes, shape {tuple(self._images.shape[1:])})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a vault holds private images and cannot be copied or pickled")


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
