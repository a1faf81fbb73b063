"""The HTML report of one run, or of several: one file without scripts that loads nothing."""

from sfumato.report.page import ReportRun, read_run, write_report

__all__ = ["ReportRun", "read_run", "write_report"]
