"""Priors from a checkpoint of the library `diffusers` (extra `diffusers`): a `UNet2DModel`, or a pipeline that has one.

Only safetensors files are read. Methods train low-rank adapters and the class embedding of such a network, which is
large and was trained by others.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato.data import DataError
from sfumato.features.weights import sha256_of
from sfumato.nets.score import SIGMA_DATA, ScoreNetwork
from sfumato.priors.prior import Prior, PriorCard

CONFIG, INDEX, SCHEDULER = "config.json", "model_index.json", "scheduler_config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
NETWORK = "UNet2DModel"
PREDICTIONS = ("epsilon", "v_prediction", "sample")
TRAINED_ON = "a diffusers checkpoint that does not state its training data"


def is_diffusers(folder: Path) -> bool:
    """Return whether a folder looks like a diffusers checkpoint."""
    return (folder / INDEX).is_file() or (folder / CONFIG).is_file()


def read_diffusers(folder: Path) -> Prior:
    """Read a checkpoint; raise `DataError` if it is none, or of an architecture that is not supported."""
    network_folder, schedule = _parts(folder)
    if _json(network_folder / CONFIG).get("_class_name") != NETWORK:
        raise DataError(
            f"{network_folder} does not hold a {NETWORK}, the only diffusers network that serves as a prior"
        )
    path = network_folder / WEIGHTS
    if list(network_folder.glob("*.index.json")):
        raise DataError(f"{network_folder} holds weights in several files; save them as one (max_shard_size)")
    if not path.is_file():
        raise DataError(f"{network_folder} has no {WEIGHTS}; save the checkpoint with safe_serialization=True")
    prediction = schedule.get("prediction_type", "epsilon")
    if prediction not in PREDICTIONS:
        raise DataError(f"{folder}: unknown prediction type {prediction!r}; there are {', '.join(PREDICTIONS)}")
    unet = _load_unet(network_folder)
    size, channels = unet.config.sample_size, unet.config.in_channels
    if isinstance(size, list | tuple):
        size = max(size)
    if not isinstance(size, int) or channels not in (1, 3):
        raise DataError(f"{folder} is not a model of grey or colour images (channels {channels}, size {size})")
    network = DiffusersNetwork(unet, _log_levels(schedule), prediction)
    card = PriorCard(folder.resolve().name, channels, size, len(network.class_rows), (), 0, 0, TRAINED_ON, "not stated")
    return DiffusersPrior(card, {}, _digest(folder, network_folder), network)


@dataclass(frozen=True)
class DiffusersPrior(Prior):
    """A prior whose network comes from `diffusers`."""

    loaded: DiffusersNetwork

    @property
    def foreign(self) -> bool:
        return True

    def network(self, channels: int | None = None) -> ScoreNetwork:
        if channels not in (None, self.card.channels):
            mode = "grey" if self.card.channels == 1 else "rgb"
            raise DataError(f"the prior {self.card.name} makes {mode} images; convert yours (--mode {mode})")
        return copy.deepcopy(self.loaded)


class DiffusersNetwork(ScoreNetwork):
    """A `UNet2DModel` with the interface of `ScoreNetwork`.

    Its discrete time of a variance-preserving process is interpolated linearly in the logarithm of the noise level.

    - unet: the network. log_levels: logarithm of the noise level at each time, increasing.
    - prediction: what the network returns, one of `PREDICTIONS`.
    """

    def __init__(self, unet: Any, log_levels: torch.Tensor, prediction: str) -> None:
        nn.Module.__init__(self)
        self.kind, self.prediction, self._log_levels = "score", prediction, log_levels
        width = unet.time_embedding.linear_2.out_features
        known = getattr(unet, "class_embedding", None)
        rows = known.weight.detach().clone() if isinstance(known, nn.Embedding) else torch.zeros(1, width)
        self.class_rows = nn.Parameter(rows)
        unet.class_embedding = nn.Identity()  # class embeddings are passed as vectors
        for module in unet.modules():  # the fused attention cannot be mapped over records
            if hasattr(module, "set_processor"):
                module.set_processor(PlainAttention())
        self.unet = unet

    def with_classes(self, shares: torch.Tensor, *, code: int = 0) -> DiffusersNetwork:
        assert not code
        changed = copy.deepcopy(self)
        changed.class_rows = nn.Parameter(shares.to(self.class_rows) @ self.class_rows.detach())
        return changed

    def field(
        self,
        noisy: torch.Tensor,
        levels: torch.Tensor,
        labels: torch.Tensor,
        code: torch.Tensor | None = None,
        condition: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert code is None
        assert condition is None
        s, dtype = levels.view(-1, 1, 1, 1), self.class_rows.dtype
        one_hot = labels[:, None] == torch.arange(len(self.class_rows), device=labels.device)  # label -1: no class
        scaled = noisy * (1 + s.square()).rsqrt()
        rows = one_hot.to(dtype) @ self.class_rows
        output = self.unet(scaled.to(dtype), self._time(levels), class_labels=rows, return_dict=False)[0].float()
        output = output[:, : noisy.shape[1]]  # some networks add a variance
        if self.prediction == "epsilon":
            clean = noisy - s * output
        elif self.prediction == "v_prediction":
            clean = (1 + s.square()).rsqrt() * (scaled - s * output)
        else:
            clean = output
        variance = s.square() + SIGMA_DATA**2
        return (clean - SIGMA_DATA**2 / variance * noisy) * variance.sqrt() / (s * SIGMA_DATA), None

    def _time(self, levels: torch.Tensor) -> torch.Tensor:
        """Return the time of noise levels, [N]: the sum of the parts of all intervals below a level."""
        table = self._log_levels.to(levels.device)
        parts = (levels.float().log()[:, None] - table[:-1]) / (table[1:] - table[:-1])
        return parts.clamp(0, 1).sum(1)


def _parts(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the folder of the network, and the settings of the noise schedule."""
    if not (folder / INDEX).is_file():
        beside = folder / SCHEDULER
        return folder, _json(beside) if beside.is_file() else {}
    index = _json(folder / INDEX)
    if latent := sorted({"vae", "vqvae", "text_encoder"} & index.keys()):
        raise DataError(
            f"{folder} is a pipeline with {latent[0]!r}; only pipelines that generate pixels serve as a prior so far"
        )
    if "unet" not in index:
        raise DataError(f"{folder} is a diffusers pipeline without a U-Net")
    beside = folder / "scheduler" / SCHEDULER
    return folder / "unet", _json(beside) if beside.is_file() else {}


def _digest(folder: Path, network_folder: Path) -> str:
    """Return the SHA-256 over weights, network settings and noise schedule."""
    schedules = (folder / SCHEDULER, folder / "scheduler" / SCHEDULER)
    files = [network_folder / WEIGHTS, network_folder / CONFIG, *(path for path in schedules if path.is_file())]
    return hashlib.sha256("".join(sha256_of(path) for path in files).encode()).hexdigest()


def _log_levels(schedule: Mapping[str, Any]) -> torch.Tensor:
    """Return the logarithm of the noise level at each time of a diffusers schedule, on the CPU."""
    count = int(schedule.get("num_train_timesteps", 1000))
    first, last = float(schedule.get("beta_start", 1e-4)), float(schedule.get("beta_end", 0.02))
    kind = schedule.get("beta_schedule", "linear")
    if schedule.get("trained_betas") is not None:
        betas = torch.tensor(schedule["trained_betas"], dtype=torch.float64)
    elif kind == "linear":
        betas = torch.linspace(first, last, count, dtype=torch.float64)
    elif kind == "scaled_linear":
        betas = torch.linspace(first**0.5, last**0.5, count, dtype=torch.float64).square()
    elif kind == "squaredcos_cap_v2":
        times = torch.linspace(0, 1, count + 1, dtype=torch.float64)
        kept = torch.cos((times + 0.008) / 1.008 * torch.pi / 2).square()
        betas = (1 - kept[1:] / kept[:-1]).clamp_max(0.999)
    else:
        raise DataError(f"the noise schedule {kind!r} is not supported; use linear, scaled_linear or squaredcos_cap_v2")
    kept = torch.cumprod(1 - betas, 0)
    return (((1 - kept) / kept).log() / 2).float()


def _load_unet(folder: Path) -> Any:
    try:
        from diffusers import UNet2DModel
    except ModuleNotFoundError as error:
        raise DataError(f"{folder} is a diffusers checkpoint; pip install 'sfumato[diffusers]'") from error
    try:
        options = {"use_safetensors": True, "local_files_only": True, "low_cpu_mem_usage": False}
        load: Any = UNet2DModel.from_pretrained
        return load(str(folder), torch_dtype=torch.float32, **options).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{folder} cannot be read by diffusers: {str(error).splitlines()[0]}") from error


class PlainAttention:
    """Self-attention of diffusers written out as matrix products, which can be traced and mapped over records."""

    def __call__(
        self,
        attention: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,  # unused; diffusers logs a line if it cannot pass it
    ) -> torch.Tensor:
        assert encoder_hidden_states is None
        assert attention_mask is None
        del temb
        maps = hidden_states.flatten(2)  # [N, channels, pixels]
        normed = maps if attention.group_norm is None else attention.group_norm(maps)
        queries, keys, values = (
            _project(layer, normed).unflatten(1, (attention.heads, -1))
            for layer in (attention.to_q, attention.to_k, attention.to_v)
        )
        weights = (queries.transpose(2, 3) @ keys * attention.scale).softmax(3)
        mixed = _project(attention.to_out[0], (values @ weights.transpose(2, 3)).flatten(1, 2))
        result = mixed + maps if attention.residual_connection else mixed
        scaled: torch.Tensor = result.unflatten(2, hidden_states.shape[2:]) / attention.rescale_output_factor
        return scaled


def _project(layer: nn.Linear, maps: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer to the channels of maps [N, channels, pixels]."""
    projected = layer.weight @ maps
    return projected if layer.bias is None else projected + layer.bias[:, None]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} does not hold a JSON object")
    return content
