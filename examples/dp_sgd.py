"""DP-SGD: train a classifier on private images through `Vault.gradient`, with calibrated noise and a certificate.

Run: `python examples/dp_sgd.py`. It takes about 15 seconds on one core; with `--quick`, a few seconds.
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import sfumato as sf
from sfumato.engine import calibrate

STEPS = 20 if "--quick" in sys.argv else 300
SAMPLING_PROB = 0.2
out = Path(tempfile.mkdtemp(prefix="sfumato-dp-sgd-"))
train, test = sf.load_images("digits"), sf.load_images("digits", split="test")

# 1. The plan: one noisy count of the images, and the noisy gradient sum of every step. A larger weight is more noise.
releases = [
    sf.Release("counts", weight=20.0, nonnegative=True),
    sf.Release("gradients", times=STEPS, sampling_prob=SAMPLING_PROB),
]
plan = calibrate(releases, sf.Budget(epsilon=3.0, delta=1e-5))
print(f"noise multiplier of the gradients: {plan['gradients'].noise:.2f}")

# 2. The private images go into the vault. Only noisy sums leave it, each charged to the ledger first.
ledger = sf.Ledger(out / "ledger.jsonl")
vault = sf.Vault(train, plan, ledger=ledger, facts={"method": "dp-sgd", "parameters": {"steps": STEPS}})
size = float(vault.counts().sum().clamp_min(1))

# 3. The loss returns one number per image. Group norm is per image; batch norm would mix images and is refused.
torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, 10)
)


def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images), labels, reduction="none")


# 4. Everything that is done with the noisy sum is post-processing: the mean, Adam, a schedule.
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
for _ in range(STEPS):
    sums = vault.gradient(network, loss, release="gradients", bound=1.0, with_labels=True)
    for name, parameter in network.named_parameters():
        parameter.grad = sums[name] / (SAMPLING_PROB * size)
    optimizer.step()

# 5. The certificate states the plan of the ledger and covers the files. The test images are public.
save_file(network.state_dict(), out / "model.safetensors")
certificate = sf.Certificate.from_ledger(ledger).covering(out, ["model.safetensors", "ledger.jsonl"])
ledger.close()
result = sf.verify(certificate.save(out / "certificate.json"))
with torch.no_grad():
    accuracy = (network(test.images / 127.5 - 1).argmax(1) == test.labels).float().mean()
print(f"certificate {'valid' if result.ok else 'NOT valid'}: epsilon {result.epsilon}; test accuracy {accuracy:.1%}")
assert result.ok
print(f"results: {out}")
