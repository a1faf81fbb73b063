"""Noisy functions: kernels, and the two ways to release an element of their Hilbert space."""

from sfumato.functional.kernels import Gaussian, Kernel, Matern, Windowed
from sfumato.functional.release import Frequencies, Part, Points

__all__ = ["Frequencies", "Gaussian", "Kernel", "Matern", "Part", "Points", "Windowed"]
