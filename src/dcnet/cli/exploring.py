"""`dcnet explore`: the page in which formulas change while one drags, written to a file and opened."""

import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dcnet.cli.own_formulas import Formulas, register
from dcnet.cli.training import fail
from dcnet.explorer import render


def explore(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; a temporary one if not given.")] = None,
    formulas: Formulas = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """Explore magnitudes and angular functions in the browser: curves, response, projected vectors, and the layer to copy."""
    try:
        register(formulas)
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
