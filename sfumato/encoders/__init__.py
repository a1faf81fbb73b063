"""Public feature networks, and where their weights come from."""

from .encoder import CARDS, Card, Encoder, Features, features, load_encoder
from .perceptual import PERCEPTUAL, Perceptual, PerceptualCard, load_perceptual, save_perceptual

__all__ = [
    "CARDS",
    "PERCEPTUAL",
    "Card",
    "Encoder",
    "Features",
    "Perceptual",
    "PerceptualCard",
    "features",
    "load_encoder",
    "load_perceptual",
    "save_perceptual",
]
