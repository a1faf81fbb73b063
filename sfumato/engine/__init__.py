"""Faster ways to compute what the vault asks for, and the search for noise. Nothing here can change the guarantee."""

from sfumato.engine.calibration import calibrate, epsilon, noise_multiplier
from sfumato.engine.performance import Performance
from sfumato.engine.vault import Vault

__all__ = ["Performance", "Vault", "calibrate", "epsilon", "noise_multiplier"]
