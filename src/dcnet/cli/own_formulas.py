"""`--formulas FILE`: a user's own magnitude and angular functions, which a command is to know."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

Formulas = Annotated[
    list[Path] | None, typer.Option("--formulas", help="Python file that registers formulas of your own; may be given several times.")
]


def register(files: list[Path] | None) -> None:
    """Runs a user's files, which register formulas."""
    for file in files or []:
        _run(file)


def _run(file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"--formulas {file}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"formulas_of_{file.stem}", file.resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"--formulas {file}: not a Python file; possible: a file that ends in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # as an import has it; dataclasses look there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file may raise
        raise ValueError(f"--formulas {file}: {type(error).__name__}: {error}") from error
