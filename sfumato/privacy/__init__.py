"""All that the guarantee rests on. Imports nothing from the rest of the package."""

from sfumato.privacy.account import Account
from sfumato.privacy.accounting import Plan, Release, bounds, epsilon
from sfumato.privacy.budget import Budget, BudgetExceeded
from sfumato.privacy.certificate import Certificate, Verification, verify
from sfumato.privacy.ledger import Ledger, LedgerError
from sfumato.privacy.vault import Vault

__all__ = [
    "Account",
    "Budget",
    "BudgetExceeded",
    "Certificate",
    "Ledger",
    "LedgerError",
    "Plan",
    "Release",
    "Vault",
    "Verification",
    "bounds",
    "epsilon",
    "verify",
]
