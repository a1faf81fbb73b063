"""All that the guarantee of a run rests on. Imports nothing from the rest of the package."""

from sfumato.privacy.accounting import Plan, Release, bounds
from sfumato.privacy.budget import Budget, BudgetExceeded
from sfumato.privacy.ledger import Ledger, LedgerError
from sfumato.privacy.vault import FailedOnPrivate, Vault

__all__ = ["Budget", "BudgetExceeded", "FailedOnPrivate", "Ledger", "LedgerError", "Plan", "Release", "Vault", "bounds"]
