"""Report: one self-contained page about one or more runs, made of the JSON in their folders."""

from dcnet.report.page import write_report

__all__ = ["write_report"]
