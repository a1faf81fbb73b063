"""Synthetic images from sensitive ones, with a differential-privacy guarantee that anybody can check."""

from sfumato.certificate import Certificate, verify
from sfumato.data import DataError, ImageSet, load_images, save_images
from sfumato.engine import GradientVault as Vault
from sfumato.engine import epsilon, noise_multiplier
from sfumato.evaluate import evaluate
from sfumato.methods import create, list_methods, load
from sfumato.privacy import Budget, BudgetExceeded, Ledger, LedgerError, Plan, Release

__version__ = "0.2.0.dev0"

__all__ = [
    "Budget",
    "BudgetExceeded",
    "Certificate",
    "DataError",
    "ImageSet",
    "Ledger",
    "LedgerError",
    "Plan",
    "Release",
    "Vault",
    "create",
    "epsilon",
    "evaluate",
    "list_methods",
    "load",
    "load_images",
    "noise_multiplier",
    "save_images",
    "verify",
]
