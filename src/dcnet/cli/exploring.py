"""`dcnet explore`: the page in which formulas change while one drags, written to a file and opened."""

import importlib.util
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dcnet.cli.training import fail
from dcnet.explorer import render


def explore(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; a temporary one if not given.")] = None,
    formulas: Annotated[list[Path] | None, typer.Option(help="Python file that registers formulas of your own; may be given several times.")] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """Explore magnitudes and angular functions in the browser: curves, response, projected vectors, and the layer to copy."""
    try:
        for file in formulas or []:
            register(file)
        page = render()
    except (ValueError, FileNotFoundError) as error:
        fail(error)
    path = Path(tempfile.mkdtemp(prefix="dcnet-")) / "explorer.html" if out is None else out
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        fail(error)
    Console(soft_wrap=True).print(f"{path} written", highlight=False)
    if show and not webbrowser.open(path.resolve().as_uri()):
        Console(soft_wrap=True).print("no browser was found; open the file in one", highlight=False)


def register(file: Path) -> None:
    """Runs a user's file, which registers its formulas."""
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
