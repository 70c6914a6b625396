"""Figures and images as text that stands in a page: no files beside it."""

import base64
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from dcnet.figures.style import SIGNED

Draw = Callable[[Any], None]  # draws on an axis


def svg(
    draw: Draw, label: str, width: float = 4.2, height: float = 3.2, margin: float = 0.18, below: float = 0.0
) -> str:
    """Draw one panel as SVG, in the page's own text color so that it can be read on light and dark.

    margin, below: room on the right, and more room below, in inches, for a legend. A panel each: the page puts as many
    side by side as the screen has room for.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # texts stay texts: smaller, and in the page's font; the salt keeps names of parts of different pictures apart
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label, "font.size": 9.0}):
        height += below
        figure = Figure(figsize=(width, height), dpi=110)
        # margins by hand: to work them out takes longer than to draw
        figure.subplots_adjust(
            left=0.9 / width, right=1.0 - margin / width, bottom=(0.55 + below) / height, top=1.0 - 0.35 / height
        )
        axis = figure.add_subplot()
        axis.patch.set_alpha(0.0)
        draw(axis)
        figure.patch.set_alpha(0.0)
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(
            out, metadata={"Date": None, "Creator": None}
        )  # `savefig` draws everything twice
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # names nobody refers to, the same in every picture
    # of places a hundredth of a point is enough; what is written between tags stays as it is
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag[0]), text)
    text = text.replace("#000000", "currentColor").replace("#262626", "currentColor")
    return text.replace(
        "<svg ", f'<svg role="img" aria-label="{_attribute(label)}" style="max-width: {width * 125:.0f}px" ', 1
    )


def png(picture: np.ndarray, signed: bool = False) -> str:
    """Return an image (H, W, C) in [0, 1] as a data address.

    One channel is shown in gray, or with `signed` dark below the middle and light above.
    """
    from matplotlib.image import imsave

    out = io.BytesIO()
    flat = picture[..., 0] if picture.shape[2] == 1 else picture
    imsave(out, flat, cmap=SIGNED if signed else "gray", vmin=0.0, vmax=1.0, format="png")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
