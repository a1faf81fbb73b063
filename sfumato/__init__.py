"""Synthetic images from sensitive ones, with a differential-privacy guarantee that anybody can check."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sfumato.threads import choose_threads

if TYPE_CHECKING:
    from sfumato.certificate import Certificate, verify
    from sfumato.cluster import ShardedImages, open_shards
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
    "ShardedImages",
    "Vault",
    "create",
    "epsilon",
    "evaluate",
    "list_methods",
    "load",
    "load_images",
    "noise_multiplier",
    "open_shards",
    "save_images",
    "verify",
]

_HOMES = {
    "sfumato.certificate": ("Certificate", "verify"),
    "sfumato.cluster": ("ShardedImages", "open_shards"),
    "sfumato.data": ("DataError", "ImageSet", "load_images", "save_images"),
    "sfumato.engine": ("epsilon", "noise_multiplier"),
    "sfumato.methods": ("create", "list_methods", "load"),
    "sfumato.privacy": ("Budget", "BudgetExceeded", "Ledger", "LedgerError", "Plan", "Release"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    """The package imports a public name when it is used: PyTorch takes seconds, a usage error must not."""

    def __getattr__(self, name: str) -> Any:
        if name == "Vault":
            return import_module("sfumato.engine").GradientVault
        if name not in _HOME:
            raise AttributeError(f"module 'sfumato' has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})

    @property
    def evaluate(self) -> Any:
        """The function, which has the name of its package."""
        return import_module("sfumato.evaluate").evaluate

    @evaluate.setter
    def evaluate(self, value: Any) -> None:
        """Ignore what the import of the package `sfumato.evaluate` assigns."""


sys.modules[__name__].__class__ = _Package
choose_threads()  # before PyTorch is imported, which reads it
