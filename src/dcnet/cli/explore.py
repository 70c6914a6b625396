"""`dcnet explore`: the page in which formulas change while one drags, written to a file and opened."""

import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from dcnet.cli.common import fail, say
from dcnet.cli.own_formulas import Formulas, register
from dcnet.explorer import render
from dcnet.util.files import write_atomically


def explore(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; a temporary one if not given.")
    ] = None,
    formulas: Formulas = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """Explore magnitudes and angular functions in the browser: curves, response, vectors, and the layer to copy."""
    try:
        if out is not None and out.is_dir():
            raise ValueError(f"--out {out} is a folder; possible: a file, such as {out / 'explorer.html'}")
        register(formulas)
        page = render()
    except (ValueError, FileNotFoundError) as error:
        fail(error)
    path = Path(tempfile.mkdtemp(prefix="dcnet-")) / "explorer.html" if out is None else out
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.encode())
    except OSError as error:
        fail(error)
    say(f"{path} written")
    if show and not webbrowser.open(path.resolve().as_uri()):
        say("no browser was found; open the file in one")
