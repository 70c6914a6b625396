"""Numbers as people write them."""


def parse_number(text: str) -> float:
    """Return a number, or a fraction such as 8/255.

    Args:
        text: digits, or two numbers with / between them.

    Examples:
        >>> from dcnet.formulas import parse_number
        >>> parse_number("8/255") == 8 / 255
        True
    """
    over, slash, under = text.partition("/")
    try:
        return float(over) / float(under) if slash else float(over)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{text!r} is no number; possible: 0.03, 8/255") from None
