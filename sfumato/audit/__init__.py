"""Empirical privacy: structural checks, attacks, and lower bounds on epsilon. A lower bound is no proof of privacy."""

from sfumato.audit.black_box import audit_one_run, distinguish, new_game
from sfumato.audit.mechanism import audit_mechanism
from sfumato.audit.membership import audit_release
from sfumato.audit.method_audit import AuditOptions, AuditReport, audit_method
from sfumato.audit.published import audit_published
from sfumato.audit.small_settings import small
from sfumato.audit.structural import check_structure

__all__ = [
    "AuditOptions",
    "AuditReport",
    "audit_mechanism",
    "audit_method",
    "audit_one_run",
    "audit_published",
    "audit_release",
    "check_structure",
    "distinguish",
    "new_game",
    "small",
]
