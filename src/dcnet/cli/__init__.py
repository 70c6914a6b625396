"""The command line: `dcnet COMMAND`, also `python -m dcnet COMMAND`."""

import io
import os
import sys
from typing import Annotated

import torch
import typer

import dcnet
from dcnet.cli import attack, bench, evaluate, explore, export, figure, finetune, lists, predict, runs, table, train
from dcnet.cli.common import printing, say
from dcnet.cli.help import CONTEXT, Command, Group


def _catalogue() -> str:
    sections = [("Magnitude functions h", dcnet.magnitudes()), ("Angular functions g", dcnet.angulars())]
    return "\n\n".join(
        "\n\n".join([f"{title}:", *(f"- {formula}" for formula in known.values())]) for title, known in sections
    )


app = typer.Typer(
    cls=Group,
    context_settings=CONTEXT,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help=f"Decoupled networks for PyTorch.\n\n{_catalogue()}",
)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        say(f"dcnet {dcnet.__version__}")
        raise typer.Exit


app.command(cls=Command, no_args_is_help=True)(train.with_recipe_flags(train.train))
app.command(cls=Command, no_args_is_help=True)(
    train.with_recipe_flags(finetune.finetune, without=("model", "pretrained"))
)
app.command(cls=Command)(evaluate.evaluate)
app.command(cls=Command, no_args_is_help=True)(predict.predict)
app.command(cls=Command)(runs.runs)
app.command(cls=Command)(attack.attack)
app.command(cls=Command, no_args_is_help=True)(export.export)
app.command(cls=Command)(bench.bench)
app.command(cls=Command, no_args_is_help=True)(figure.figure)
app.command(cls=Command, no_args_is_help=True)(figure.report)
app.command(cls=Command)(explore.explore)
app.command(cls=Command, no_args_is_help=True)(table.table)
for listed in (lists.models, lists.recipes, lists.data, lists.operators):
    app.command(cls=Command, rich_help_panel="What there is")(listed)


def main() -> None:
    """Run the command line.

    Characters that the output's encoding lacks, such as ‖ in Latin-1, are replaced. If the output cannot be written at
    all, the program ends with a message.
    """
    _open_closed()
    # Numbers below 1e-38 take a CPU many times as long. Adversarial training leaves some in kernels that nothing uses.
    torch.set_flush_denormal(True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with printing():
        try:
            app()
        finally:
            sys.stdout.flush()


def _open_closed() -> None:
    """End the program if its output is closed, as after >&-. If the error output is closed, discard what goes there."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, as it is needed to the end
    if sys.stdout is None:
        sys.stderr.write("error: the output cannot be written: it is closed\n")
        raise SystemExit(1)
