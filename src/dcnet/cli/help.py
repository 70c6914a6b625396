"""How commands show their help, -h too and no type after a flag that takes no value, and what ends them all.

Ctrl-C does, and so does an error in a network of the user's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from dcnet.cli.common import fail, say
from dcnet.models import error_of_own_code

RECIPE = "Recipe"  # the panel of flags that are the fields of a recipe


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperOption) and parameter.is_flag and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


@contextmanager
def _opposites_in_words(parameters: list[Any]) -> Iterator[None]:
    """Name the opposites of a recipe's flags in their help: a column for them leaves no room for whole names."""
    switches = [p for p in parameters if p.secondary_opts and p.rich_help_panel == RECIPE]
    before = [(switch.help, switch.secondary_opts) for switch in switches]
    for switch in switches:
        switch.help = f"{switch.help} Its opposite: {switch.secondary_opts[0]}."
        switch.secondary_opts = []
    try:
        yield
    finally:
        for switch, (words, opposites) in zip(switches, before, strict=True):
            switch.help, switch.secondary_opts = words, opposites


class Command(TyperCommand):
    """A command whose flags have no `<bool>` after them."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _opposites_in_words(self.params):
            super().format_help(ctx, formatter)


class Group(TyperGroup):
    """The same for the commands together; Ctrl-C ends each with a word, where it does not say more itself.

    An error in the code of a user's network ends it with a line, not a traceback: it is no defect of the command.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("stopped", stderr=True)
            raise typer.Exit(130) from None
        except Exception as error:  # whatever a user's code may raise
            if error_of_own_code(error) is None:
                raise
            fail(error)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


CONTEXT = {"help_option_names": ["-h", "--help"]}
