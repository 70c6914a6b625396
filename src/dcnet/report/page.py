"""The page itself: contents and pictures put into the template."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dcnet.figures import (
    draw_angles,
    draw_convergence,
    draw_deepfool,
    draw_eps,
    draw_features,
    draw_learned,
    draw_norms,
    draw_steps,
    example_captions,
    example_pictures,
    learned_parameters,
)
from dcnet.figures.layers import cosines_title, filter_sheet, filters_title, kernel_cosines
from dcnet.figures.robustness import deepfool_sizes
from dcnet.figures.style import room_below
from dcnet.inspection.examples import STEPS
from dcnet.report.contents import Shown, differing_fields, gather
from dcnet.report.pictures import png, svg
from dcnet.robustness.evaluate import as_typed
from dcnet.robustness.records import check_ups_of, common_eps
from dcnet.util.files import write_atomically
from dcnet.util.text import printable
from dcnet.version import __version__

_OPEN = 3  # runs whose details are open from the start


def write_report(folders: Sequence[str | Path], out: str | Path, data_root: str | Path = "data") -> Path:
    """Return the file written: `out` itself where it ends in .html, else index.html in that folder."""
    if not folders:
        raise ValueError("a report needs one or more run folders: dcnet report runs/NAME …")
    path = Path(out) if Path(out).suffix == ".html" else Path(out) / "index.html"
    if path.parent.is_file():
        raise ValueError(
            f"the report cannot be written to {path}, as {path.parent} is a file; possible: a folder, or a file "
            "ending in .html"
        )
    shown = gather(folders, data_root)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, printable(render(shown, _page_of_tables(shown, path)), keep="\n\t").encode())
    return path


def _page_of_tables(shown: Sequence[Shown], path: Path) -> str:
    """Return the link to the page that `dcnet table --render` has written beside runs that are its cells.

    Empty where there is none.
    """
    for one in shown:
        for folder in list(one.run.folder.resolve().parents)[:2]:
            if (folder / "tables.html").is_file():
                return quote(Path(os.path.relpath(folder / "tables.html", path.parent.resolve())).as_posix())
    return ""


def render(shown: Sequence[Shown], tables: str = "") -> str:
    """Return the page as text. tables: a link to a page of the paper's tables."""
    from jinja2 import Environment, FileSystemLoader

    here = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(here), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Any] = {"value": _value, "number": _number, "breakable": _breakable}
    environment.filters |= filters
    return environment.get_template("page.html.jinja").render(
        version=__version__,
        tables=tables,
        style=(here / "style.css").read_text(),
        runs=shown,
        eps=common_eps(one.records for one in shown),
        steps=STEPS,
        open=len(shown) <= _OPEN,
        differing=differing_fields(shown),
        overview=_overview(shown),
        robustness=_robustness(shown),
        pictures={one.title: _pictures(one) for one in shown},
        kernels={one.title: _kernels(one) for one in shown},
        examples={one.title: _examples(one) for one in shown},
    )


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _value(value: Any) -> str:
    """Return a recipe's value, as one writes it."""
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _breakable(text: str) -> Any:
    """Return an attack's name as one types it, which may go on in the next line after a colon."""
    from markupsafe import Markup, escape

    return Markup(":<wbr>").join(escape(part) for part in as_typed(text).split(":"))


def _overview(shown: Sequence[Shown]) -> list[str]:
    """Return the curves of all runs together."""
    runs = {one.title: one.metrics for one in shown if one.metrics}
    room = room_below(len(runs))
    return [
        svg(partial(draw_convergence, runs=runs, what=what), f"{what} by epoch", 4.6, 3.6, below=room)
        for what in ("accuracy", "loss")
        if runs
    ]


def _robustness(shown: Sequence[Shown]) -> list[str]:
    """Return the pictures of robustness: accuracy against ε and steps, and sizes of perturbations."""
    records = {one.title: one.records for one in shown}
    checked = {name: records[name] for name in check_ups_of(records)[1]}
    panels = [
        ("accuracy by ε", partial(draw_eps, runs=checked), checked),
        ("accuracy by steps", partial(draw_steps, runs=checked), checked),
    ]
    for norm in ("l2", "linf"):
        fooled = {name: mine for name, mine in records.items() if deepfool_sizes(mine, norm) is not None}
        panels.append((f"DeepFool's perturbations, {norm}", partial(draw_deepfool, runs=fooled, norm=norm), fooled))
    return [svg(draw, name, 4.6, 3.6, below=room_below(len(runs))) for name, draw, runs in panels if runs]


def _pictures(one: Shown) -> list[str]:
    """Return the pictures of one run: what it has learned besides kernels, angles and norms, and 2-D features."""
    inspected = one.inspection
    learned = learned_parameters(one.metrics)
    pictures = [
        svg(partial(draw_learned, metrics=one.metrics, parameter=name), f"{one.title}: learned {name}", margin=1.0)
        for name in learned
    ]
    if inspected is not None:
        pictures.append(svg(partial(draw_angles, inspected=inspected, bar=False), f"{one.title}: angles"))
        pictures.append(svg(partial(draw_norms, inspected=inspected, bar=False), f"{one.title}: norms", below=0.36))
        if "features" in inspected:
            pictures.append(
                svg(
                    partial(draw_features, inspected=inspected, title="Features by class"),
                    f"{one.title}: features",
                    4.2,
                    4.2,
                )
            )
    return pictures


def _kernels(one: Shown) -> list[dict[str, str]]:
    """Return the first layer's kernels, and the cosines between them, as images."""
    if one.inspection is None:
        return []
    cosines = kernel_cosines(one.inspection)
    return [
        {
            "source": png(filter_sheet(one.inspection), signed=True),
            "caption": filters_title(one.inspection),
            "name": "kernels",
        },
        {
            "source": png(0.5 + 0.5 * cosines[..., None], signed=True),
            "caption": cosines_title(cosines),
            "name": "cosines",
        },
    ]


def _examples(one: Shown) -> list[list[dict[str, str]]]:
    """Return the adversarial examples: for each its pictures with captions."""
    if one.inspection is None:
        return []
    found = []
    for example in one.inspection["examples"]:
        captions = example_captions(example, one.inspection["classes"])
        pictures = example_pictures(example)
        found.append(
            [
                {"source": png(picture, name == "change"), "caption": captions[name], "name": name}
                for name, picture in pictures.items()
            ]
        )
    return found
