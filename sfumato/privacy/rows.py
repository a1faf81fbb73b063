"""Private records, and how one row is computed from each of them.

`vault.py` is what may be asked of records and what that costs; here is how a function of the user's, a feature map say,
is applied to them: to each image by itself, in a random order, in batches whose shapes do not depend on the records.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import _tensor_str
from torch._functorch import autograd_function as functions
from torch._functorch.pyfunctorch import VmapInterpreter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sfumato.privacy.sampling import shuffled, standard_normals

Feature = Callable[..., torch.Tensor]  # of images, or of images and labels, to a row for each

PLACE_MARGIN = 4e-3  # of a bound: by which a row may come out otherwise at another place of a batch, by rounding
PROBES = 6  # public images on which a feature map is tried
MARGIN = 1e-2  # relative, between an image's row alone and in company: a mistake shows, rounding does not
REPEAT_MARGIN = 1e-5  # relative, between a row and the same row again
SIZES = 4  # of batches, times six
PLAIN = 0.37  # pixels of a public image without anything on it
BATCH_SIZE, DEVICE_BATCH_SIZE = 128, 512
MIXING = (torch.index_fill, torch.Tensor.index_fill, torch.Tensor.index_fill_)
RESIDENT = 2**32  # bytes of images that may live on an accelerator


class Records(Protocol):
    """Private images with labels: uint8 or float [N, C, H, W], int64 [N] or None, and the public class names."""

    @property
    def images(self) -> torch.Tensor: ...
    @property
    def labels(self) -> torch.Tensor | None: ...
    @property
    def classes(self) -> Sequence[str]: ...


class FailedOnPrivate(RuntimeError):
    """A feature or loss failed on private images. What it said is not passed on: it could hold pixels."""

    def __init__(self, what: str, error: str) -> None:
        super().__init__(
            f"{what} failed on private images with a {error}; what it said is not shown, as it could hold pixels. It "
            "worked on public ones: does it depend on the values? That it failed may tell of an image, so that this "
            "run promises nothing any more: mend it, and begin a new one"
        )


class Watched(TorchFunctionMode):
    """Notes an operation that fails, whether or not whoever called it catches the error.

    Guarantee: an operation can fail on one image of a batch only, and what is done about it is done to all of them. So
    that it failed is not kept from the vault: it raises `OperationFailed` on the way out. Operations are watched where
    they are called and, `Below`, where they are carried out: those of derivatives and of functions in functions, too.
    What is given all images at once is refused, below.
    """

    here: ClassVar[list[Watched]] = []  # all that last

    def __init__(self, held: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.failed = ""
        self._below = Below(held)

    def __enter__(self) -> Self:
        self._below.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        self.here.append(self)
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            if func in MIXING:
                raise RuntimeError("PyTorch's rule of index_fill for vmap gives each image the last one's value")
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.failed = self.failed or type(error).__name__
            raise

    def __exit__(self, *details: Any) -> None:
        self.here.remove(self)
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._below.__exit__(*details)  # type: ignore[no-untyped-call]
        if failed := self.failed or self._below.failed:
            raise OperationFailed(failed, details[1]) from None


class Below(TorchDispatchMode):
    """Notes an operation that fails as it is carried out.

    If asked for, it holds all tensors that operations read and that none of them made.
    """

    def __init__(self, held: list[torch.Tensor] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed = ""
        self._held, self._made = held, set[StorageWeakRef]()
        self._device = held[0].device if held else None  # the first is a parameter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            if any(kind is not torch.nn.Parameter for kind in types):
                raise RuntimeError("a tensor of a kind that computes by itself is given all images at once")
            made = func(*args, **(kwargs or {}))
        except Exception as error:
            self.failed = self.failed or type(error).__name__
            raise
        if self._held is not None:
            given = {_storage(tensor): tensor for tensor in _tensors((args, kwargs))}
            self._held += [tensor for storage, tensor in given.items() if storage not in self._made]
            lasting = [
                tensor for tensor in _tensors(made) if tensor.device == self._device
            ]  # in the graph's own memory
            self._made |= {_storage(tensor) for tensor in lasting} - given.keys()
        return made


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


# What follows stands in places of PyTorch through which all of its kind must go, however deep in derivatives, hooks or
# threads, where `Watched` is not asked. It does something only while private images are at hand, and then in any
# thread: PyTorch differentiates in threads of its own.


def _refuse(why: str) -> None:
    """Guarantee: nobody can keep it from the vault."""
    for watched in list(Watched.here):
        watched.failed = watched.failed or "RuntimeError"
    raise RuntimeError(why)


_carry_out_by_hand = functions.custom_function_call_vmap_helper
_carry_out = VmapInterpreter.process
_show = _tensor_str._functorch_wrapper_str_intern


def _by_hand(interpreter: Any, vmap_function: Any, op: Any, *operands: Any, **kwargs: Any) -> Any:
    """Rules for vmap that somebody has written: they are given all images. Those of this package keep them apart."""
    if Watched.here and not str(getattr(op, "__module__", "")).startswith("sfumato."):
        _refuse(f"{op} has its own rule for vmap, which is given all images; leave that to PyTorch")
    return _carry_out_by_hand(interpreter, vmap_function, op, *operands, **kwargs)


def _of_higher_order(self: VmapInterpreter, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators on functions, such as `cond`: under vmap in vmap some of PyTorch's own rules mix images."""
    if Watched.here and op is not functions.custom_function_call:
        _refuse(f"{op} is an operator on functions: under vmap it could be given all images")
    return _carry_out(self, op, args, kwargs)


def _shown(tensor: torch.Tensor, **how: Any) -> str:
    if Watched.here:
        _refuse("images must not be printed, nor what is made of them: that shows the whole batch")
    text: str = _show(tensor, **how)  # type: ignore[no-untyped-call]
    return text


functions.custom_function_call_vmap_helper = _by_hand
VmapInterpreter.process = _of_higher_order  # type: ignore[method-assign]
_tensor_str._functorch_wrapper_str_intern = _shown


def kind_of(error: Exception) -> str:
    return error.kind if isinstance(error, OperationFailed) else type(error).__name__


class OperationFailed(RuntimeError):
    """An operation failed; the error's type, and what was said in the end, if anything was."""

    def __init__(self, kind: str, said: BaseException | None) -> None:
        self.kind = kind
        super().__init__(f"an operation failed with a {kind}, and that was kept quiet" if said is None else str(said))


def failed(what: str, error: str) -> Exception:
    """Guarantee: an error that tells nothing but its type; too little memory is no one image's doing."""
    if error in ("MemoryError", "OutOfMemoryError"):
        return MemoryError(f"{what} needs more memory than there is for a batch of images")
    return FailedOnPrivate(what, error)


class Rows:
    """Records in memory, and rows that are computed from each by itself.

    Guarantee: that of `_rows` and `_apply`. Nothing here leaves the vault, which is built on it.
    """

    def __init__(self, records: Records, device: str | torch.device, batch_size: int | None) -> None:
        self.classes = tuple(records.classes)
        self.device = torch.device(device)
        self._images = records.images.detach()
        if self._images.nbytes <= RESIDENT:
            self._images = self._images.to(self.device)
        self._labels = _checked(records.labels, len(self._images), len(self.classes))
        self._classes_there = None if self._labels is None else self._labels.to(self.device)
        self._batch_size = batch_size or (BATCH_SIZE if self.device.type == "cpu" else DEVICE_BATCH_SIZE)
        self._turns = itertools.count()
        self._public: torch.Tensor | None = None
        self._passes = 1

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
                first = witness if first is None else first
                apart, length = (torch.linalg.vector_norm(t.double()) for t in (witness - first, first))
                changed = torch.maximum(changed, apart / length.clamp_min(1e-30))
            except Exception as error:
                failure = kind_of(error)
            if failure:  # raised here, where the error is forgotten: it would be kept as the context otherwise
                raise failed("the feature map", failure)
            yield index, rows
        steady = False
        try:
            steady = bool(changed <= PLACE_MARGIN)  # after the last batch, when nothing has left yet
        except Exception as error:  # a device tells of what failed on it only when it is waited for
            failure = kind_of(error)
        if failure:
            raise failed("the feature map", failure)
        if not steady:
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

        size, place = self._arrangement(turn, number, self._batch_size)
        order = torch.arange(size, device=self.device)
        order[place], order[-1] = size - 1, place
        inputs = [_filled(images, size, self._probes()[-1])[order]]
        if labels is not None:
            inputs.append(_filled(labels, size, labels.new_zeros(()))[order])
        with torch.no_grad(), Watched():
            rows = torch.vmap(alone, randomness="error")(*inputs).detach()
        if len(rows) != size:
            raise RuntimeError(f"a feature map must give rows of the images at hand, got {len(rows)} for {size}")
        return rows[order[: len(images)]], rows[place]

    def _arrangement(self, turn: int, number: int, records: int, varied: bool = True) -> tuple[int, int]:
        """(size of a batch with room for so many records, place of the public image). Guarantee: no record is read."""
        more = 3 * (2 * random.Random(turn).randrange(SIZES) + turn % 2) + number % 3 if varied else 0
        size = max(records, self._tried) + 1 + more
        # The public image stands at a place that changes, too: whoever stood there is at the end.
        return size, random.Random(f"{turn} {number}").randrange(records)

    def _lanes(
        self, chosen: torch.Tensor, by_class: bool, records: int, varied: bool
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """Batch by batch the indices of the chosen records, [lanes, size], -1 where there is none; and a place.

        There is one lane, or one for each class, and `records` in a lane. At the place, which changes, there is none.
        Sizes are varied from batch to batch, for code that could keep a tensor; or all the same, for a recording.

        Guarantee: that of `_rows`: a random order within each lane, so that one record more moves one other of its
        lane; sizes do not depend on the records.
        """
        turn, order = next(self._turns), shuffled(chosen)
        lanes = [order]
        if by_class:
            labels = torch.zeros_like(order) if self._labels is None else self._labels[order]
            lanes = [order[labels == label] for label in range(len(self.classes))]
        for number in range(-(-max(map(len, lanes)) // records)):
            size, place = self._arrangement(turn, number, records, varied)
            index = torch.full((len(lanes), size), -1)
            for row, lane in zip(index, lanes, strict=True):
                here = lane[number * records : (number + 1) * records]
                row[: len(here)] = here
            index[:, -1], index[:, place] = index[:, place].clone(), -1
            yield index, place

    def _seated(
        self,
        chosen: torch.Tensor,
        by_class: bool,
        records: int,
        with_labels: bool,
        views: int,
        draws: int,
        varied: bool = True,
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor, int]]:
        """Batch by batch of `_lanes` what a loss is given, [lanes, size, ...]; who is there at all; and the place.

        Guarantee: where there is no record there is a public image with public numbers, always the same.
        """
        for index, place in self._lanes(chosen, by_class, records, varied):
            here = index[index >= 0]
            places = (
                (index.flatten() >= 0).nonzero()[:, 0].to(self.device)
            )  # found on the host: no waiting for a device
            inputs = [_placed(self._batch(here), places, self._probes()[-1], index.shape)]
            if with_labels:
                lanes = torch.arange(len(index), device=self.device).repeat_interleave(index.shape[1])
                classes = lanes if by_class else torch.zeros_like(lanes)
                inputs.append(_placed(self._labels_of(here), places, classes, index.shape))
            if draws:
                normals = self._normals(here, views * draws).reshape(-1, views, draws)
                inputs.append(_placed(normals, places, self._public_normals(views, draws), index.shape))
            there = (index >= 0).to(self.device)
            yield inputs, there, place

    def _public_inputs(self, lanes: int, with_labels: bool, views: int, draws: int) -> list[torch.Tensor]:
        """The public images in each lane, as `_seated` gives private ones."""
        images, classes = self._probes(), len(self.classes)
        inputs = [images.expand(lanes, *images.shape)]
        if with_labels:
            labels = torch.arange(len(images), device=self.device).expand(lanes, -1) % classes
            inputs.append(torch.arange(lanes, device=self.device)[:, None] + 0 * labels if lanes > 1 else labels)
        if draws:
            normals = self._public_normals(len(images) * views, draws)
            inputs.append(normals.reshape(len(images), views, draws).expand(lanes, -1, -1, -1))
        return inputs

    def _normals(self, index: torch.Tensor, count: int) -> torch.Tensor:
        """Random numbers of these records. Guarantee: independent of each other and of everything else."""
        return standard_normals(len(index), count, self.device)

    def _public_normals(self, views: int, draws: int) -> torch.Tensor:
        """Numbers that could be normal ones. Guarantee: fixed."""
        spread = torch.arange(1, views * draws + 1, dtype=torch.float64) * ((math.sqrt(5) - 1) / 2) % 1
        normals: torch.Tensor = torch.special.ndtri(spread).float().reshape(views, draws)
        return normals.to(self.device)

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


def _placed(private: torch.Tensor, places: torch.Tensor, public: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Something for each place of a batch of that shape: what is private at `places`, what is public at all others."""
    each = public.expand(shape.numel(), *private.shape[1:]).clone()
    return each.index_copy_(0, places, private).reshape(*shape, *private.shape[1:])
