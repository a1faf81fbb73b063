"""Gradients as a CUDA graph: what `Vault.gradient(record=True)` replays."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from sfumato.capturing import capture
from sfumato.privacy.gradients import Gradients
from sfumato.privacy.rows import MARGIN

RECORD_AFTER = 2  # plain calls, on public images


class Recorded:
    """`Gradients.clipped` for batches of `size` records, as a CUDA graph: one launch in place of a thousand.

    Guarantee: that of `clipped`, for what is replayed is what it does. The loss runs when it is recorded, on public
    images and under `torch.vmap`, each time on another number of them, so that what it kept does not fit; on private
    images none of its code runs any more, only these operations. What they read beside a batch is held here, so that no
    other tensor, with private numbers, ever comes to lie there. A replay is compared with a plain call before it is
    trusted.
    """

    def __init__(self, engine: Gradients, inputs: Sequence[torch.Tensor], size: int) -> None:
        self.groups, self._of = engine.groups, (engine.model, engine.loss)  # held, so that none takes their place
        self._device, self._turn = inputs[0].device, threading.Lock()
        self._inputs = [part[:, :size].clone() for part in inputs]
        self._present = torch.ones(inputs[0].shape[:2], dtype=torch.bool, device=self._device)[:, :size].clone()
        self._held = engine.held = list(engine.state().values())
        try:
            with torch.cuda.device(self._device):
                self._record(engine, inputs, size)
        finally:
            engine.held = None
        turned = [part.flip(1) for part in self._inputs]
        some = torch.arange(size, device=self._device).expand_as(self._present) % 2 == 0
        for mine, plain in zip(self(turned, some), engine.clipped(turned, some), strict=True):
            if not torch.allclose(mine, plain, 0.0, MARGIN * float(plain.abs().max())):
                raise RuntimeError("a replay gives something else than a plain call")

    def _record(self, engine: Gradients, inputs: Sequence[torch.Tensor], size: int) -> None:
        here, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            for more in range(1, RECORD_AFTER + 1):
                there = torch.ones(inputs[0].shape[:2], dtype=torch.bool, device=self._device)[:, : size + more]
                engine.clipped([part[:, : size + more] for part in inputs], there)
        here.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(here), capture(self._graph, stream):
            self._result = engine.clipped(self._inputs, self._present)

    def __call__(
        self, inputs: Sequence[torch.Tensor], present: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with self._turn, torch.cuda.device(self._device):
            for mine, given in zip((*self._inputs, self._present), (*inputs, present), strict=True):
                if mine.shape != given.shape:
                    raise RuntimeError("a recording is for batches of one shape")
                mine.copy_(given)
            self._graph.replay()
            total, norms, losses = self._result
            return total.clone(), norms.clone(), losses.clone()  # the next replay overwrites them
