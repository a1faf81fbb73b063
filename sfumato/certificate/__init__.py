"""Certificates: the guarantee of a run as a file that can be issued, signed and verified."""

from sfumato.certificate.issue import Certificate
from sfumato.certificate.verify import Verification, verify

__all__ = ["Certificate", "Verification", "verify"]
