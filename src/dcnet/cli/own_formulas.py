"""`--formulas FILE`: a user's own magnitude and angular functions, which a command is to know."""

import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from dcnet.training.own_formulas import trust_formulas

Formulas = Annotated[
    list[Path] | None,
    typer.Option(
        "--formulas",
        help="Python file that registers formulas of your own; may be given several times.",
        metavar="FILE",
    ),
]
TrustFormulas = Annotated[
    bool,
    typer.Option(
        "--trust-formulas",
        help="Execute the copy of formulas of your own in the run folder; only for a folder that you trust.",
    ),
]


def register(files: list[Path] | None, trusted: Iterable[Path] = ()) -> None:
    """Execute a user's files, which register formulas, then the copies in run folders that are trusted."""
    for file in files or []:
        _run(file)
    for folder in trusted:
        trust_formulas(folder)


def _run(file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"--formulas {file}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"formulas_of_{file.stem}", file.resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"--formulas {file}: not a Python file; possible: a file that ends in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(
        spec
    )  # as an import has it; dataclasses look there
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt as error:  # no limit of time would be right for all files
        raise ValueError(f"--formulas {file}: interrupted while it was executed{_line(error, file)}") from None
    except SystemExit as error:
        raise ValueError(f"--formulas {file}: it ends the program, by {error!r}{_line(error, file)}") from error
    except Exception as error:  # whatever a user's file may raise
        raise ValueError(f"--formulas {file}: {type(error).__name__}: {error}{_line(error, file)}") from error


def _line(error: BaseException, file: Path) -> str:
    """Return where in the file it happened; nothing for a syntax error, which says so itself."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()
    ]
    return f", line {lines[-1]}" if lines else ""
