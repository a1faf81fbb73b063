"""Priors from diffusers checkpoints, on small ones that the library itself writes here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet
from sfumato.features.weights import sha256_of
from sfumato.methods.prior_painter import PainterTraining
from sfumato.methods.teacher import TeacherSettings
from sfumato.nets.score import ScoreNetwork
from sfumato.priors import load_prior
from sfumato.priors.denoising import draw_images
from sfumato.priors.diffusers_checkpoint import WEIGHTS, DiffusersNetwork, _log_levels
from sfumato.testing import build

diffusers = pytest.importorskip("diffusers", reason="the extra `diffusers` is not installed")
SIZE = 8
SMALL: dict[str, Any] = {
    "sample_size": SIZE,
    "in_channels": 1,
    "out_channels": 1,
    "block_out_channels": (8, 8),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}


def make(folder: Path, schedule: Any = None, **changes: Any) -> Any:
    """Write a network and its schedule; return the network."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = diffusers.UNet2DModel(**{**SMALL, **changes})
    network.save_pretrained(folder)
    (schedule or diffusers.DDPMScheduler()).save_pretrained(folder)
    return network.eval()


def clean_image(network: ScoreNetwork, noisy: torch.Tensor, level: float, label: int) -> torch.Tensor:
    levels = torch.full((len(noisy),), level)
    labels = torch.full((len(noisy),), label)
    with torch.no_grad():
        return noisy + level**2 * network(noisy, levels, labels)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_the_denoised_image_is_that_of_the_library(prediction: str, kind: str, tmp_path: Path) -> None:
    """At a time of the schedule: the scheduler's own `pred_original_sample`."""
    schedule = diffusers.DDPMScheduler(prediction_type=prediction, beta_schedule=kind, clip_sample=False)
    network = make(tmp_path, schedule)
    prior = load_prior(tmp_path)
    time = 300
    kept = float(schedule.alphas_cumprod[time])
    level = ((1 - kept) / kept) ** 0.5
    noisy = torch.randn(3, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(1)) * level
    scaled = noisy * kept**0.5
    with torch.no_grad():
        output = network(scaled, torch.tensor(time)).sample
    expected = schedule.step(output, time, scaled).pred_original_sample
    found = clean_image(prior.network(), noisy, level, -1)
    assert torch.allclose(found, expected, atol=2e-3 * max(1.0, float(expected.abs().max())))
    assert not torch.allclose(clean_image(prior.network(), noisy, 1.5 * level, -1), expected, atol=2e-3)


def test_noise_levels_are_those_of_the_schedule() -> None:
    schedule = diffusers.DDPMScheduler()
    expected = ((1 - schedule.alphas_cumprod) / schedule.alphas_cumprod).sqrt().log()
    assert torch.allclose(_log_levels(schedule.config), expected, atol=1e-4)


def test_classes_are_mixed(tmp_path: Path) -> None:
    make(tmp_path, num_class_embeds=3)
    prior = load_prior(tmp_path)
    assert prior.card.classes == 3
    network = prior.network()
    noisy = torch.randn(2, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    swapped = network.with_classes(torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    assert torch.allclose(clean_image(swapped, noisy, 1.0, 0), clean_image(network, noisy, 1.0, 1))
    assert not torch.allclose(clean_image(swapped, noisy, 1.0, 0), clean_image(network, noisy, 1.0, 0))
    assert draw_images(swapped, (1, SIZE, SIZE), torch.arange(2), torch.Generator(), levels=2).shape == noisy.shape


def test_a_pipeline_is_read(tmp_path: Path) -> None:
    network = make(tmp_path / "network")
    diffusers.DDPMPipeline(network, diffusers.DDPMScheduler()).save_pretrained(tmp_path / "pipeline")
    assert isinstance(load_prior(tmp_path / "pipeline").network(), DiffusersNetwork)
    index = tmp_path / "pipeline" / "model_index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "text_encoder": [None, None]}))
    load_prior(tmp_path / "pipeline")
    index.write_text(json.dumps({**content, "text_encoder": ["transformers", "CLIPTextModel"]}))
    with pytest.raises(DataError, match="'text_encoder': it makes images of a text"):
        load_prior(tmp_path / "pipeline")
    index.write_text(json.dumps({**content, "vae": ["diffusers", "AutoencoderKL"]}))
    with pytest.raises(DataError, match=r"vae.*cannot be read"):
        load_prior(tmp_path / "pipeline")


def latent_pipeline(folder: Path, kind: str, channels: int = 1, **changes: Any) -> Any:
    """Write a latent pipeline whose autoencoder halves the side; return the pipeline."""
    options: dict[str, Any] = {
        "in_channels": channels,
        "out_channels": channels,
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 2,
        "norm_num_groups": 4,
        "scaling_factor": 0.5,
    }
    if kind == "AutoencoderKL":
        options |= {"sample_size": 8, "shift_factor": 0.25}
    else:
        options |= {"num_vq_embeddings": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = diffusers.UNet2DModel(**{**SMALL, "sample_size": 4, "in_channels": 2, "out_channels": 2, **changes})
        coder = getattr(diffusers, kind)(**options)
    schedule = diffusers.DDIMScheduler(beta_schedule="scaled_linear")
    pipeline = diffusers.LDMPipeline(coder if kind == "VQModel" else None, network, schedule)
    pipeline.save_pretrained(folder)
    if kind == "AutoencoderKL":
        coder.save_pretrained(folder / "vae")
        index = folder / "model_index.json"
        index.write_text(json.dumps({**json.loads(index.read_text()), "vae": ["diffusers", kind]}))
    return coder.eval()


@pytest.mark.parametrize("kind", ["AutoencoderKL", "VQModel"])
def test_latents_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    coder = latent_pipeline(tmp_path, kind)
    prior = load_prior(tmp_path)
    assert (prior.card.size, prior.card.channels) == (SIZE, 1)
    space = prior.space((1, SIZE, SIZE), torch.device("cpu"))
    assert space.maps == (2, 4, 4)
    images = torch.rand(40, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        found = coder.encode(images)
        shift, latents = (0.25, found.latent_dist.mean) if kind == "AutoencoderKL" else (0.0, found.latents)
        decoded = coder.decode(latents).sample.clamp(-1, 1)
    maps = space.encode(images)
    assert torch.allclose(maps, (latents - shift) * 0.5, atol=1e-5)
    assert torch.allclose(space.decode(maps), decoded, atol=1e-4)
    assert torch.allclose(space.encode(images.expand(-1, 3, -1, -1)), maps, atol=1e-5)
    assert prior.network()(maps, torch.ones(40), torch.zeros(40, dtype=torch.int64)).shape == maps.shape
    with pytest.raises(DataError, match=r"multiples of 4 pixels, not 10 × 8; .*--size 4"):
        prior.check_shape((1, 10, 8))


@pytest.mark.parametrize(("key", "kind"), [("dp-diffusion", "AutoencoderKL"), ("atelier", "VQModel")])
def test_a_fit_in_latent_space_names_the_autoencoder(key: str, kind: str, tmp_path: Path, few_digits: ImageSet) -> None:
    latent_pipeline(tmp_path / "prior", kind, channels=3)
    adaptation = PainterTraining(pool=20, rounds=1, practice_steps=2, practice_batch=4, levels=2)
    settings = {"prior": str(tmp_path / "prior"), "steps": 2, "sampling_prob": 0.3, "device": "cpu", "epsilon": 10.0}
    settings |= {"tune": "low-rank"} if key == "dp-diffusion" else {"teacher": TeacherSettings(steps=3)}
    model = build(key, adaptation=adaptation, **settings).fit(few_digits, run_dir=tmp_path / "run")
    stated = model.certificate_.public_facts["prior"]
    assert stated["autoencoder"]["name"] == kind
    folder = "vae" if kind == "AutoencoderKL" else "vqvae"
    assert stated["autoencoder"]["sha256"] == sha256_of(tmp_path / "prior" / folder / WEIGHTS)
    assert stated["sha256"] == load_prior(tmp_path / "prior").sha256
    assert sf.verify(tmp_path / "run" / "certificate.json")
    samples = model.sample(6).images
    assert samples.shape == (6, 1, SIZE, SIZE)
    assert torch.equal(sf.load(tmp_path / "run").sample(6).images, samples)
    before = load_prior(tmp_path / "prior").network().state_dict()
    made = model.network_ if key == "dp-diffusion" else model.generator_
    changed = {name for name, value in made.state_dict().items() if not torch.equal(value, before.get(name, value))}
    assert {"unet.conv_in.weight", "unet.mid_block.resnets.0.conv1.weight"} <= changed  # merged adapters


def test_errors_of_latent_pipelines_are_clear(tmp_path: Path) -> None:
    latent_pipeline(tmp_path / "pickled", "AutoencoderKL").save_pretrained(
        tmp_path / "pickled" / "vae", safe_serialization=False
    )
    (tmp_path / "pickled" / "vae" / WEIGHTS).unlink()
    with pytest.raises(DataError, match=r"vae has no .*safe_serialization"):
        load_prior(tmp_path / "pickled")
    latent_pipeline(tmp_path / "unlike", "VQModel", in_channels=4, out_channels=4)
    with pytest.raises(DataError, match="2 latent channels, the network 4"):
        load_prior(tmp_path / "unlike")


def condition_model(folder: Path, *, text: bool) -> None:
    attention = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")} if text else {}
    middle = "UNetMidBlock2DCrossAttn" if text else "UNetMidBlock2D"
    options = {**SMALL, "down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, **attention}
    network = diffusers.UNet2DConditionModel(**options, mid_block_type=middle, cross_attention_dim=8)
    network.save_pretrained(folder)
    diffusers.DDPMScheduler().save_pretrained(folder)


def test_a_conditional_network_serves_without_text_only(tmp_path: Path) -> None:
    condition_model(tmp_path / "plain", text=False)
    network = load_prior(tmp_path / "plain").network()
    noisy = torch.randn(2, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    assert clean_image(network, noisy, 1.0, 0).isfinite().all()
    condition_model(tmp_path / "text", text=True)
    with pytest.raises(DataError, match="conditioned on text"):
        load_prior(tmp_path / "text")


def test_a_fit_trains_adapters_and_saves(tmp_path: Path, few_digits: ImageSet) -> None:
    make(tmp_path / "prior")
    adaptation = PainterTraining(pool=20, rounds=1, practice_steps=2, practice_batch=4, levels=2)
    settings = {"prior": str(tmp_path / "prior"), "steps": 2, "sampling_prob": 0.3, "device": "cpu", "epsilon": 10.0}
    with pytest.raises(DataError, match="tune=low-rank"):
        build("dp-diffusion", adaptation=adaptation, **settings).fit(few_digits)
    settings["tune"] = "low-rank"
    model = build("dp-diffusion", adaptation=adaptation, **settings).fit(few_digits, run_dir=tmp_path / "run")
    stated = model.certificate_.public_facts["prior"]
    assert stated["sha256"] == load_prior(tmp_path / "prior").sha256
    assert "does not state its training data" in stated["trained_on"]
    assert sf.verify(tmp_path / "run" / "certificate.json")
    assert torch.equal(sf.load(tmp_path / "run").sample(6).images, model.sample(6).images)


def test_errors_are_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "good")
    make(tmp_path / "pickled").save_pretrained(tmp_path / "pickled", safe_serialization=False)
    (tmp_path / "pickled" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(DataError, match="safe_serialization"):
        load_prior(tmp_path / "pickled")
    make(tmp_path / "shards")
    (tmp_path / "shards" / "diffusion_pytorch_model.safetensors.index.json").write_text("{}")
    with pytest.raises(DataError, match="several files"):
        load_prior(tmp_path / "shards")
    make(tmp_path / "cut")
    weights = tmp_path / "cut" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(DataError, match="cannot be read"):
        load_prior(tmp_path / "cut")
    make(tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": "UNet1DModel"}))
    with pytest.raises(DataError, match="UNet2DModel"):
        load_prior(tmp_path / "other")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(DataError, match=r"sfumato\[diffusers\]"):
        load_prior(tmp_path / "good")


def test_the_hash_covers_weights_settings_and_schedule(tmp_path: Path) -> None:
    make(tmp_path)
    digests = {load_prior(tmp_path).sha256}
    diffusers.DDPMScheduler(prediction_type="v_prediction").save_pretrained(tmp_path)
    digests.add(load_prior(tmp_path).sha256)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "sample_size": 16}))
    digests.add(load_prior(tmp_path).sha256)
    assert len(digests) == 3


def test_the_hash_covers_the_autoencoder(tmp_path: Path) -> None:
    latent_pipeline(tmp_path, "VQModel")
    digests = {load_prior(tmp_path).sha256}
    config = tmp_path / "vqvae" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "scaling_factor": 0.25}))
    digests.add(load_prior(tmp_path).sha256)
    assert len(digests) == 2
