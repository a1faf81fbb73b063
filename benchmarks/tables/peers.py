"""Programs of other authors on our protocol: their images, our data sets, classifiers and distances.

    python -m benchmarks peers --authors FOLDER --folder DATA

FOLDER holds clones by the names of their repositories. Programs run as they are, at their authors' settings; replaced
are the reading of data (the same images) and what follows the images (their own evaluation, plots).

- DP-MERF (github.com/ParkLabML/DP-MERF, `code_balanced/mnist_sr_gen.py`): five epochs, 10,000 features, noise 25 and 5
  for ε = 0.2 and 1, as its README says; sensitivity 2 / n, so that one image may be replaced.
- DPDM (github.com/2019ChenGong/DPImageBench, network, loss, accounting, sampler and its copy of Opacus; needs
  opt_einsum): its settings for MNIST (batches of 4,096, Adam 3e-4, clipping norm 0.001, average 0.999), but 20 epochs
  of 150, 4 noise draws of 32, and 50 deterministic steps of its sampler in place of 1,000. Its training loop is
  written out here, because theirs needs several GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.runner import Job, jobs
from benchmarks.speed.authors import program
from sfumato.data import ImageSet
from sfumato.methods.parameters import chosen_device

MEASURES = ("small_cnn", "convnet", "resnet18", "fidelity", "fid")
NOISE = {0.2: 25.0, 1.0: 5.0}
NAMES = {"mnist": "digits", "fashion-mnist": "fashion"}  # data sets, as DP-MERF calls them
UNUSED = ("torchvision", "torchvision.datasets", "torchvision.transforms", "xgboost")
UNUSED += ("matplotlib", "matplotlib.pyplot", "matplotlib.cm", "matplotlib.colors")


UNUSED_BY_DPDM = (*UNUSED, "torchvision.utils", "models.DP_Diffusion.model.op", "models.DP_Diffusion.dataset_tool")
EPOCHS, DRAWS, LOGICAL, PHYSICAL, SAMPLED = 20, 4, 4096, 1024, 4000
SAMPLER = {"num_steps": 50, "tmin": 0.002, "tmax": 80.0, "rho": 7.0, "guid_scale": 0.0, "stochastic": False}


class Batches(list[tuple[torch.Tensor, torch.Tensor]]):
    """What their program takes from a data loader."""

    batch_size: int

    def __init__(self, images: ImageSet, batch_size: int, device: torch.device) -> None:
        assert images.labels is not None
        pixels = images.images.to(device).float() / 255
        super().__init__(zip(pixels.split(batch_size), images.labels.to(device).split(batch_size), strict=True))
        self.batch_size = batch_size


def clone(options: argparse.Namespace, name: str) -> Path:
    if options.authors is None or not (options.authors / name).is_dir():
        raise SystemExit(f"pass --authors FOLDER, which holds a clone named {name}")
    return (options.authors / name).resolve()


def dp_merf(job: Job, seed: int, options: argparse.Namespace, train: ImageSet, _: ImageSet) -> ImageSet:
    device = chosen_device(options.device)
    arguments = f"--data {NAMES[job.data]} --noise-factor {NOISE[job.epsilon or 0]} --seed {seed} --log-dir ./"
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(program(clone(options, "DP-MERF") / "code_balanced", arguments))
        fakes = {name: MagicMock(__spec__=ModuleSpec(name, None)) for name in UNUSED}
        with patch.dict(sys.modules, fakes):
            main: Any = importlib.import_module("mnist_sr_gen")

        def loaders(size: int, *_: Any, **__: Any) -> tuple[Batches, None]:
            return Batches(train, size, device), None

        for name, value in (("get_mnist_dataloaders", loaders), ("test", MagicMock())):
            stack.enter_context(patch.object(main, name, value))
        for name in ("test_gen_data", "log_final_score"):
            stack.enter_context(patch.object(main, name))
        main.main()
        with np.load(scratch / "synthetic_mnist.npz") as held:
            pixels, labels = held["data"].reshape(-1, 1, 28, 28), held["labels"].reshape(-1)
    drawn = torch.from_numpy(pixels).mul(255).round().clamp(0, 255).byte()
    return ImageSet(drawn, torch.from_numpy(labels), train.classes)


def dpdm(job: Job, seed: int, options: argparse.Namespace, train: ImageSet, _: ImageSet) -> ImageSet:
    assert train.labels is not None
    device, folder = chosen_device(options.device), clone(options, "DPImageBench")
    with contextlib.ExitStack() as stack:
        stack.enter_context(program(folder, ""))
        stack.enter_context(patch.object(sys, "path", [str(folder / "opacus"), *sys.path]))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        theirs = {name: MagicMock(__spec__=ModuleSpec(name, None)) for name in UNUSED_BY_DPDM}
        with patch.dict(sys.modules, theirs):
            opacus, memory = (importlib.import_module(name) for name in ("opacus", "opacus.utils.batch_memory_manager"))
            network, denoiser, losses, samplers, averages = (
                importlib.import_module(f"models.DP_Diffusion.{name}")
                for name in ("model.ncsnpp", "denoiser", "score_losses", "samplers", "model.ema")
            )
        torch.manual_seed(seed)
        size = {"image_size": train.shape[1], "num_in_channels": train.shape[0], "num_out_channels": train.shape[0]}
        plain = network.NCSNpp(**size, label_dim=len(train.classes), attn_resolutions=[14], ch_mult=[2, 2])
        model = denoiser.EDMDenoiser(plain.to(device)).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
        data = TensorDataset(train.images.to(device).float() / 127.5 - 1, train.labels.to(device))
        average = averages.ExponentialMovingAverage(model.parameters(), decay=0.999)
        model, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(data, batch_size=min(LOGICAL, len(train)), shuffle=True),
            target_delta=1e-5,
            target_epsilon=job.epsilon,
            epochs=EPOCHS,
            max_grad_norm=1e-3,
            noise_multiplicity=DRAWS,
            account_history=None,
        )
        loss = losses.EDMLoss(p_mean=-1.2, p_std=1.2, n_noise_samples=DRAWS, n_classes=len(train.classes)).get_loss
        for _ in range(EPOCHS):
            parts = {"max_physical_batch_size": PHYSICAL, "optimizer": optimizer, "n_splits": None}
            with memory.BatchMemoryManager(data_loader=loader, **parts) as batches:
                for pixels, labels in batches:
                    optimizer.zero_grad(set_to_none=True)
                    loss(model, pixels, labels).mean().backward()
                    optimizer.step()
                    if not optimizer._is_last_step_skipped:
                        average.update(model.parameters())
        average.copy_to(model.parameters())
        model.eval()
        labels = torch.arange(len(train), device=device) % len(train.classes)
        drawn = []
        for part in labels.split(SAMPLED):
            noise = torch.randn(len(part), *train.shape, device=device)
            with torch.no_grad():
                made = samplers.ddim_sampler(noise, part, model, **SAMPLER)
            drawn.append(made.add(1).mul(127.5).clamp(0, 255).round().byte().cpu())
    return ImageSet(torch.cat(drawn), labels.cpu(), train.classes)


JOBS = [
    *jobs("DP-MERF", None, list(NAMES), list(NOISE), draw=dp_merf, measures=MEASURES),
    *jobs("DPDM, short", None, ["mnist"], [1.0, 10.0], draw=dpdm, measures=MEASURES, seeds=1),
]
