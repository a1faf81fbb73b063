"""Faster ways to compute what the vault asks for, and the search for noise. Nothing here can change the guarantee."""

from sfumato.engine.calibration import calibrate, noise_multiplier
from sfumato.engine.performance import Performance

__all__ = ["Performance", "calibrate", "noise_multiplier"]
