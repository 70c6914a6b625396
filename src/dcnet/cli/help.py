"""How commands show their help: -h too, and no type after a flag that takes no value."""

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption


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
    """The same for the commands together."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


CONTEXT = {"help_option_names": ["-h", "--help"]}
