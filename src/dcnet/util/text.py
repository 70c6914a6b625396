"""Make names and messages fit for a terminal, a page or a figure."""

import unicodedata
from collections.abc import Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_DIRECTIONS = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}  # change the direction of the text after them


def valid(text: str) -> str:
    """Return the text with a replacement for bytes of a file's name that are not UTF-8, which nothing can encode."""
    return text.encode("utf-8", "surrogateescape" if _only_bytes(text) else "replace").decode("utf-8", "replace")


def printable(text: object, keep: str = "") -> str:
    """Return the text on one line, with replacements for control characters and what is not UTF-8.

    keep: characters to keep.
    """
    return "".join(letter if letter in keep or not _controls(letter) else _REPLACEMENT for letter in valid(str(text)))


def _only_bytes(text: str) -> bool:
    """Return whether surrogates only stand for bytes, as in Python's names of files."""
    return not any("\ud800" <= letter <= "\udc7f" or "\udd00" <= letter <= "\udfff" for letter in text)


def _controls(letter: str) -> bool:
    return unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") or letter in _DIRECTIONS


def count(number: float, word: str) -> str:
    """Return the number, a fraction with four digits, and its word: "1 layer", "2 layers", "0.534 epochs"."""
    shown = f"{number:.4g}" if isinstance(number, float) else str(number)
    return f"{shown} {word}" if number == 1 else f"{shown} {word}s"


def few(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def one_mismatch(error: RuntimeError) -> str:
    """Return one reason why a state dict does not fit, of an error that names every tensor."""
    reasons = [line.strip() for line in str(error).splitlines()][1:] or [str(error)]
    chosen = next((line for line in reasons if line.startswith("size mismatch")), reasons[0])
    return f"for one, {chosen if len(chosen) <= 200 else chosen[:200] + '…'}"
