"""How commands show their help, -h too and no type after a flag that takes no value, and what ends them all.

Ctrl-C does, and so does an error in a network of the user's own.
"""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from dcnet.cli.common import fail, say
from dcnet.models import error_of_own_code


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperOption) and parameter.is_flag and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command whose flags have no `<bool>` after them."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


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
