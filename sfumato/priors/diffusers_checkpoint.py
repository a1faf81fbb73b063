"""Priors from a checkpoint of the library `diffusers` (extra `diffusers`): a U-Net, or a pipeline that has one.

A pipeline may generate pixels, or the latents of an autoencoder that it holds (`AutoencoderKL`, `VQModel`). Only
safetensors files are read. Methods train low-rank adapters and the class embedding of such a network, which is large
and was trained by others. Networks that are conditioned on text are refused.
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
from sfumato.priors.latent_space import IMAGES_PER_BATCH, DrawingSpace, Pixels
from sfumato.priors.prior import MAX_RATIO, Prior, PriorCard

CONFIG, INDEX, SCHEDULER = "config.json", "model_index.json", "scheduler_config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
NETWORKS = ("UNet2DModel", "UNet2DConditionModel")
AUTOENCODERS = {"vae": ("AutoencoderKL",), "vqvae": ("VQModel",)}  # by their place in a pipeline
TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3", "bert", "prior", "image_encoder")
PREDICTIONS = ("epsilon", "v_prediction", "sample")
TRAINED_ON = "a diffusers checkpoint that does not state its training data"


def is_diffusers(folder: Path) -> bool:
    """Return whether a folder looks like a diffusers checkpoint."""
    return (folder / INDEX).is_file() or (folder / CONFIG).is_file()


def read_diffusers(folder: Path) -> Prior:
    """Read a checkpoint; raise `DataError` if it is none, or of an architecture that is not supported."""
    network_folder, autoencoder_folder, schedule = _parts(folder)
    prediction = schedule.get("prediction_type", "epsilon")
    if prediction not in PREDICTIONS:
        raise DataError(f"{folder}: unknown prediction type {prediction!r}; there are {', '.join(PREDICTIONS)}")
    unet = _load(network_folder, NETWORKS)
    _refuse_text(unet, network_folder)
    size, channels = unet.config.sample_size, unet.config.in_channels
    if isinstance(size, list | tuple):
        size = max(size)
    if not isinstance(size, int):
        raise DataError(f"{folder} does not state its size (sample_size in {CONFIG})")
    autoencoder = None
    if autoencoder_folder is not None:
        autoencoder = LatentCoder(_load(autoencoder_folder, AUTOENCODERS[autoencoder_folder.name]), autoencoder_folder)
        if autoencoder.latent_channels != channels:
            raise DataError(
                f"{folder}: the autoencoder has {autoencoder.latent_channels} latent channels, the network {channels}"
            )
        size, channels = size * autoencoder.factor, autoencoder.channels
    if channels not in (1, 3):
        raise DataError(f"{folder} is not a model of grey or colour images (channels {channels}, size {size})")
    network = DiffusersNetwork(unet, _log_levels(schedule), prediction)
    card = PriorCard(folder.resolve().name, channels, size, len(network.class_rows), (), 0, 0, TRAINED_ON, "not stated")
    digest = _digest(folder, network_folder, autoencoder_folder)
    return DiffusersPrior(card, {}, digest, network, autoencoder)


@dataclass(frozen=True)
class DiffusersPrior(Prior):
    """A prior whose network comes from `diffusers`, with the autoencoder of its latents if it has one."""

    loaded: DiffusersNetwork
    autoencoder: LatentCoder | None = None

    @property
    def foreign(self) -> bool:
        return True

    @property
    def _autoencoder_facts(self) -> dict[str, Any]:
        return self.autoencoder.facts if self.autoencoder else {}

    def check_shape(self, shape: tuple[int, int, int]) -> None:
        super().check_shape(shape)
        multiple = self.loaded.multiple * (self.autoencoder.factor if self.autoencoder else 1)
        if shape[1] % multiple or shape[2] % multiple:
            low, high = self.card.size / MAX_RATIO, self.card.size * MAX_RATIO
            sizes = [str(size) for size in range(multiple, int(high) + 1, multiple) if size >= low]
            raise DataError(
                f"the prior {self.card.name} serves images whose sides are multiples of {multiple} pixels, not "
                f"{shape[1]} × {shape[2]}; pass a size (--size {sizes[0] if sizes else multiple})"
            )

    def space(self, shape: tuple[int, int, int], device: torch.device) -> DrawingSpace:
        if self.autoencoder is None:
            return Pixels(shape, self.card.channels)
        return DiffusersLatents(shape, self.autoencoder, device)

    def network(self) -> ScoreNetwork:
        return copy.deepcopy(self.loaded)


class LatentCoder:
    """The autoencoder of a latent pipeline.

    - model: an `AutoencoderKL` or `VQModel` of diffusers.
    - folder: that it comes from.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self.model, config = model.requires_grad_(False), model.config
        self.channels, self.latent_channels = config.in_channels, config.latent_channels
        self.factor = 2 ** (len(config.block_out_channels) - 1)
        self.scale, self.shift = config.scaling_factor, config.get("shift_factor") or 0.0
        self.facts = {"name": config["_class_name"], "sha256": sha256_of(folder / WEIGHTS), "trained_on": TRAINED_ON}
        for module in model.encoder.modules():  # the fused attention cannot be mapped over records
            if hasattr(module, "set_processor"):
                module.set_processor(PlainAttention())


class DiffusersLatents(DrawingSpace):
    """Latents of an autoencoder of diffusers: the mean of their distribution, in the units of the network."""

    limit = float("inf")

    def __init__(self, shape: tuple[int, int, int], autoencoder: LatentCoder, device: torch.device) -> None:
        factor = autoencoder.factor
        super().__init__(shape, (autoencoder.latent_channels, shape[1] // factor, shape[2] // factor))
        self.facts, self._coder, self._model = autoencoder.facts, autoencoder, autoencoder.model.to(device)

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        coder, maps = self._coder, []
        if images.shape[1] != coder.channels:  # a grey image has equal channels
            images = images.mean(1, keepdim=True).expand(-1, coder.channels, -1, -1)
        for part in images.split(IMAGES_PER_BATCH):
            found = self._model.encode(part, return_dict=False)[0]
            maps.append(found.mode() if hasattr(found, "mode") and not isinstance(found, torch.Tensor) else found)
        scaled: torch.Tensor = (torch.cat(maps) - coder.shift) * coder.scale
        return scaled

    @torch.no_grad()
    def decode(self, maps: torch.Tensor) -> torch.Tensor:
        coder = self._coder
        parts = (maps / coder.scale + coder.shift).split(IMAGES_PER_BATCH)
        images = torch.cat([self._model.decode(part, return_dict=False)[0] for part in parts])
        images = images if images.shape[1] == self.shape[0] else images.mean(1, keepdim=True)
        clamped: torch.Tensor = images.expand(-1, self.shape[0], -1, -1).clamp(-1, 1)
        return clamped


class DiffusersNetwork(ScoreNetwork):
    """A U-Net of diffusers with the interface of `ScoreNetwork`.

    Its discrete time of a variance-preserving process is interpolated linearly in the logarithm of the noise level.

    - unet: the network.
    - log_levels: logarithm of the noise level at each time, increasing.
    - prediction: what the network returns, one of `PREDICTIONS`.
    """

    def __init__(self, unet: Any, log_levels: torch.Tensor, prediction: str) -> None:
        nn.Module.__init__(self)
        self.kind, self.prediction, self._log_levels = "score", prediction, log_levels
        self.multiple = 2 ** (len(unet.config.block_out_channels) - 1)  # of a side of what it draws
        self._no_text = {"encoder_hidden_states": None} if type(unet).__name__ == NETWORKS[1] else {}
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
        given = {"class_labels": rows, "return_dict": False, **self._no_text}
        output = self.unet(scaled.to(dtype), self._time(levels), **given)[0].float()
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


def _parts(folder: Path) -> tuple[Path, Path | None, Mapping[str, Any]]:
    """Return the folders of network and autoencoder, and the settings of the noise schedule."""
    if not (folder / INDEX).is_file():
        beside = folder / SCHEDULER
        return folder, None, _json(beside) if beside.is_file() else {}
    index = {name for name, kind in _json(folder / INDEX).items() if kind and kind != [None, None]}
    if text := sorted(index.intersection(TEXT)):
        raise DataError(
            f"{folder} is a pipeline with {text[0]!r}: it makes images of a text; only pipelines without text serve as "
            "a prior"
        )
    if "unet" not in index:
        raise DataError(f"{folder} is a diffusers pipeline without a U-Net")
    latent = sorted(index.intersection(AUTOENCODERS))
    beside = folder / "scheduler" / SCHEDULER
    autoencoder = folder / latent[0] if latent else None
    return folder / "unet", autoencoder, _json(beside) if beside.is_file() else {}


def _refuse_text(unet: Any, folder: Path) -> None:
    """Raise `DataError` for a network that needs more than noise level and class."""
    crossed = any(type(module).__name__ == "BasicTransformerBlock" for module in unet.modules())
    if crossed or unet.config.get("addition_embed_type") or unet.config.get("encoder_hid_dim_type"):
        raise DataError(f"{folder} holds a network that is conditioned on text; only networks without text are priors")


def _digest(folder: Path, network_folder: Path, autoencoder_folder: Path | None) -> str:
    """Return the SHA-256 over weights and settings of network and autoencoder, and the noise schedule."""
    schedules = (folder / SCHEDULER, folder / "scheduler" / SCHEDULER)
    files = [network_folder / WEIGHTS, network_folder / CONFIG, *(path for path in schedules if path.is_file())]
    if autoencoder_folder is not None:
        files += [autoencoder_folder / WEIGHTS, autoencoder_folder / CONFIG]
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


def _load(folder: Path, kinds: tuple[str, ...]) -> Any:
    """Load a model of diffusers from safetensors."""
    kind = _json(folder / CONFIG).get("_class_name")
    if kind not in kinds:
        raise DataError(f"{folder} holds {kind}; a prior needs {' or '.join(kinds)} there")
    if list(folder.glob("*.index.json")):
        raise DataError(f"{folder} holds weights in several files; save them as one (max_shard_size)")
    if not (folder / WEIGHTS).is_file():
        raise DataError(f"{folder} has no {WEIGHTS}; save the checkpoint with safe_serialization=True")
    try:
        import diffusers
    except ModuleNotFoundError as error:
        raise DataError(f"{folder} is a diffusers checkpoint; pip install 'sfumato[diffusers]'") from error
    try:
        options = {"use_safetensors": True, "local_files_only": True, "low_cpu_mem_usage": False}
        load: Any = getattr(diffusers, str(kind)).from_pretrained
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
