"""A guess at what a misspelled word was meant to be."""

import difflib
import re
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean …?' where something known looks like the word, else ''.

    What has the same numbers comes first: bfloat16 is bf16 rather than float32.
    """
    names = list(known)
    same = [name for name in names if re.findall(r"\d+", name) == re.findall(r"\d+", word)]
    for some in (same, names):
        if close := difflib.get_close_matches(word, some, n=1, cutoff=0.5):
            return f" Did you mean {close[0]!r}?"
    return ""
