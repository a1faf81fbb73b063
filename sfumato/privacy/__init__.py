"""Everything that a run's guarantee rests on. Imports nothing from the rest of the package."""

from sfumato.privacy.accounting import Plan, Release, bounds
from sfumato.privacy.budget import Budget, BudgetExceeded
from sfumato.privacy.ledger import Ledger, LedgerError
from sfumato.privacy.vault import RedactedError, Vault

__all__ = ["Budget", "BudgetExceeded", "Ledger", "LedgerError", "Plan", "RedactedError", "Release", "Vault", "bounds"]
