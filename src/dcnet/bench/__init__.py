"""Benchmarks: what a decoupled layer or network costs, as a ratio to the plain one in the same run."""

from dcnet.bench.cases import Case, cases, model_cases
from dcnet.bench.records import run
from dcnet.bench.table import around, read_page, render, render_into

__all__ = ["Case", "around", "cases", "model_cases", "read_page", "render", "render_into", "run"]
