"""Fast computation of queries, and calibration of noise. The guarantee relies on none of it but CUDA graph replay."""

from sfumato.engine.calibration import calibrate, epsilon, noise_multiplier, with_share
from sfumato.engine.gradient_vault import GradientVault, Performance

__all__ = ["GradientVault", "Performance", "calibrate", "epsilon", "noise_multiplier", "with_share"]
