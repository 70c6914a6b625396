"""The page itself: contents and pictures put into the template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from dcnet.inspection.examples import STEPS
from dcnet.report.contents import Shown, differing_fields, gather
from dcnet.report.pictures import Draw, png, svg
from dcnet.training.checkpoint import write_atomically
from dcnet.version import __version__

_OPEN = 3  # runs whose details are open from the start


def write_report(folders: Sequence[str | Path], out: str | Path, data_root: str | Path = "data") -> Path:
    """The file written: `out` itself where it ends in .html, else index.html in that folder."""
    if not folders:
        raise ValueError("a report needs one or more run folders: dcnet report runs/NAME …")
    shown = gather(folders, data_root)
    path = Path(out) if Path(out).suffix == ".html" else Path(out) / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render(shown).encode())
    return path


def render(shown: Sequence[Shown]) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader

    here = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(here), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"value": _value, "number": _number}
    return environment.get_template("page.html.jinja").render(
        version=__version__,
        style=(here / "style.css").read_text(),
        runs=shown,
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
    """A recipe's value, as one writes it."""
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _overview(shown: Sequence[Shown]) -> str | None:
    """The curves of all runs together."""
    runs = {one.title: one.run.metrics for one in shown if one.run.metrics}
    if not runs:
        return None
    return svg([lambda axis: draw_convergence(axis, runs), lambda axis: draw_convergence(axis, runs, "loss")], "accuracy and loss by epoch")


def _robustness(shown: Sequence[Shown]) -> str | None:
    """Accuracy against ε and steps, and sizes of perturbations, of the runs that have them."""
    checked = {one.title: one.run.attacks for one in shown if one.verdict is not None}
    draws: list[Draw] = []
    if checked:
        draws += [lambda axis: draw_eps(axis, checked), lambda axis: draw_steps(axis, checked)]
    for norm in ("l2", "linf"):
        fooled = {one.title: one.run.attacks for one in shown if deepfool_sizes(one.run.attacks, norm) is not None}
        if fooled:
            draws.append(lambda axis, norm=norm, fooled=fooled: draw_deepfool(axis, fooled, norm))  # type: ignore[misc]
    return svg(draws, "robustness curves") if draws else None


def _pictures(one: Shown) -> list[str]:
    """Of one run: what it has learned besides kernels, angles and norms, and features where there are two."""
    metrics, inspected = one.run.metrics, one.inspection
    pictures = []
    learned = learned_parameters(metrics)
    if learned:
        # one legend, beyond the last panel
        draws: list[Draw] = [lambda axis, name=name: draw_learned(axis, metrics, name, legend=name == learned[-1]) for name in learned]  # type: ignore[misc]
        pictures.append(svg(draws, f"{one.title}: learned parameters", right=0.85, width=9.2 / min(2, len(draws))))
    if inspected is not None:
        draws = [lambda axis: draw_angles(axis, inspected, bar=False), lambda axis: draw_norms(axis, inspected, bar=False)]
        pictures.append(svg(draws, f"{one.title}: angles and norms"))
        if "features" in inspected:
            pictures.append(svg([lambda axis: draw_features(axis, inspected, "Features by class")], f"{one.title}: features", 5.0, 5.0))
    return pictures


def _kernels(one: Shown) -> list[dict[str, str]]:
    """The first layer's kernels, and the cosines between them, as images."""
    if one.inspection is None:
        return []
    cosines = kernel_cosines(one.inspection)
    return [
        {"source": png(filter_sheet(one.inspection), signed=True), "caption": filters_title(one.inspection), "name": "kernels"},
        {"source": png(0.5 + 0.5 * cosines[..., None], signed=True), "caption": cosines_title(cosines), "name": "cosines"},
    ]


def _examples(one: Shown) -> list[list[dict[str, str]]]:
    """Adversarial examples: for each its pictures with captions."""
    if one.inspection is None:
        return []
    found = []
    for example in one.inspection["examples"]:
        captions = example_captions(example, one.inspection["classes"])
        pictures = example_pictures(example)
        found.append([{"source": png(picture, name == "change"), "caption": captions[name], "name": name} for name, picture in pictures.items()])
    return found
