"""Calls of a network of one's own, MODULE:CALLABLE, and what is said of errors in that code."""

import inspect
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

_INSTALLED = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
_INSTALLED.append(Path(__file__).parent.parent)  # ours


def call(name: str, make: Any, offered: dict[str, int]) -> Any:
    """Return what the callable makes of those of the offered arguments that it takes.

    name: what the user calls it. Raises a ValueError where the callable needs other arguments, or fails.
    """
    possible = f"offered by name are {', '.join(f'{key}={value}' for key, value in offered.items())}"
    try:
        signature = inspect.signature(make)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} does not say which arguments it takes ({error}); {possible}") from error
    taken = _taken(signature, offered)
    try:
        signature.bind(**taken)
    except TypeError as error:
        raise ValueError(
            f"{name} cannot be called: {error}; {possible}. Give other arguments a default value, or name a function "
            "without them that calls this one"
        ) from error
    try:
        return make(**taken)
    except Exception as error:  # whatever a user's code may raise
        raise ValueError(f"{name} cannot be made: {described(error, name)}") from error


def _taken(signature: inspect.Signature, offered: dict[str, int]) -> dict[str, int]:
    """Return those of the arguments that can be given by name."""
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {key: value for key, value in offered.items() if key in names}


def described(error: BaseException, *names: str) -> str:
    """Return an error in one line: its class, its words, and where in the code of these networks it happened."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if words else ''}{words}{place_of(error, names)}"


def place_of(error: BaseException, names: Iterable[str]) -> str:
    """Return file and line of the user's innermost frame, in brackets; nothing where their code was not running.

    names: MODULE:CALLABLE of the networks whose code is asked for.
    """
    packages = {name.partition(":")[0].partition(".")[0] for name in names}
    frames = list(traceback.walk_tb(error.__traceback__))
    if not any(_package(frame) in packages for frame, _ in frames):
        return ""
    frame, line = next(pair for pair in reversed(frames) if _package(pair[0]) in packages or not _installed(pair[0]))
    function = frame.f_code.co_name
    inside = "" if function.startswith("<") else f", in {function}"
    return f" ({frame.f_code.co_filename}, line {line}{inside})"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _installed(frame: FrameType) -> bool:
    """Tell whether the code is a library's, Python's or ours, and not some other file of the user's."""
    file = frame.f_code.co_filename
    return file.startswith("<") or any(Path(file).is_relative_to(folder) for folder in _INSTALLED)
