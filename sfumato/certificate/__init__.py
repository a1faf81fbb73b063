"""The guarantee of a run as a file: issue it, sign it, check it."""

from sfumato.certificate.issue import Certificate
from sfumato.certificate.verify import Verification, verify

__all__ = ["Certificate", "Verification", "verify"]
