"""The evaluation protocol on real data: anchors (real images in place of synthetic ones) and methods.

    python benchmarks/protocol.py --data mnist fashion-mnist --profile full --json benchmarks/results/protocol.json
    python benchmarks/protocol.py --methods dp-merf --epsilon 1 …        methods beside the anchors

An anchor trains the classifiers on the real training split and tests them on the real test split, and measures the
distance of the two splits: the best that any synthetic set can be expected to reach.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

import sfumato as sf
from sfumato.evaluate import PROFILES, evaluate, summary


def run(name: str, method: str | None, epsilon: float, options: argparse.Namespace) -> dict[str, Any]:
    images, test = sf.load_images(name), sf.load_images(name, split="test")
    if method is not None:
        images = sf.create(method, epsilon=epsilon, device=options.device).fit(images).sample(60_000)
    started = time.perf_counter()
    network = None if options.network == "none" else options.network
    metrics = evaluate(images, test=test, profile=options.profile, network=network, device=options.device)
    for entry in metrics["utility"].values():
        entry.pop("confusion", None)
    seconds = round(time.perf_counter() - started, 1)
    row = {"data": name, "images": method or "real", "epsilon": epsilon if method else None, "seconds": seconds}
    print(json.dumps({**row, **summary(metrics)}), flush=True)
    return {**row, **metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion-mnist"])
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--profile", default="full", choices=sorted(PROFILES))
    parser.add_argument("--network", default="effnet_lite0")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [run(name, method, options.epsilon, options) for name in options.data for method in [None, *options.methods]]
    if options.json:
        device = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{platform.machine()}, CPU"
        content = {"command": "python benchmarks/protocol.py (see its docstring)", "device": device, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
