"""Public feature networks, and where their weights come from."""

from .encoder import CARDS, Card, Encoder, Features, features, load_encoder

__all__ = ["CARDS", "Card", "Encoder", "Features", "features", "load_encoder"]
