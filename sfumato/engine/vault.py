"""The vault with gradients: what is differentiated here is traced, run record by record and clipped by the vault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sfumato.engine.performance import Performance
from sfumato.privacy import vault as core
from sfumato.privacy.tracing import public_records


class Vault(core.Vault):
    """`privacy.Vault`, and DP-SGD's query on top of its `vectors`."""

    def gradient(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor],
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
        - views, draws: each image is evaluated `views` times, each time with `draws` standard normal numbers of its
          own, [images, draws]; the gradient of the mean is clipped.
        - performance: how to compute this query; default: the vault's.

        The caller divides by public numbers and takes the step.
        """
        if views < 1 or draws < 0 or (views > 1 and not draws):
            raise ValueError(f"{views} views with {draws} random numbers each: views must differ by something")
        faster: Performance = performance or self._performance or Performance()
        classes, normals = len(self.classes) if by_class else None, (views, draws) if draws else ()

        def differentiated() -> Any:
            tried = self._tried(with_labels) + ([public_records(normals, self.device)] if normals else [])
            return faster.differentiate(model, loss, bound, classes, views, tried)

        kinds = [(name, value.shape, value.requires_grad) for name, value in model.named_parameters()]
        key = [faster, str(bound), classes, with_labels, normals, kinds]
        found = self._remembered(f"{release}, differentiated", (model, loss), key, differentiated)
        noised = self.vectors(
            found.function,
            {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())},
            release=release,
            groups=found.groups,
            by_class=by_class,
            with_labels=with_labels,
            normals=normals,
            performance=faster,
        )
        gradients: dict[str, torch.Tensor] = found.assemble(noised)
        return gradients
