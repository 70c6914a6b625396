"""A guess at the meaning of a misspelled word."""

import difflib
import re
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean …?' if a known word looks like this one, else ''.

    Words with the same numbers come first: bfloat16 is bf16 rather than float32.
    """
    names, numbers = list(known), re.findall(r"\d+", word)
    same = [name for name in names if numbers and re.findall(r"\d+", name) == numbers]
    # with the same numbers, fewer letters must agree: float16 is fp16, but foo is not deepfool
    for some, cutoff in ((same, 0.5), (names, 0.6)):
        if close := difflib.get_close_matches(word, some, n=1, cutoff=cutoff):
            return f" Did you mean {close[0]!r}?"
    return ""
