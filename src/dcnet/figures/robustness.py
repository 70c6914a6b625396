"""Attacks: perturbation sizes, accuracy against ε, and images before and after."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dcnet.figures.style import SIGNED, add_legend, hide, labels, line_styles, new_figure, room_below, short
from dcnet.inspection.examples import decoded
from dcnet.robustness import parse_attack
from dcnet.robustness.records import check_ups_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Attacks = list[dict[str, Any]]  # what `attacks.json` of a run folder holds


def deepfool_sizes(attacks: Attacks, norm: str) -> Sequence[float] | None:
    """Return the sorted perturbation sizes of the last DeepFool in that norm; None where there was none."""
    found = deepfool_entry(attacks, norm)
    return None if found is None else found["sizes"]


def deepfool_entry(attacks: Attacks, norm: str) -> dict[str, Any] | None:
    """Return the last DeepFool in that norm on the run itself, with true labels; None where there was none."""
    if norm not in ("l2", "linf"):
        raise ValueError(f"unknown norm {norm!r}; possible: l2, linf")
    found = []
    for result in attacks:
        for entry in result["attacks"]:
            attack = parse_attack(entry["attack"])
            own = not result.get("transfer") and result.get("labels", "true") == "true"
            if own and attack.name == "deepfool" and attack.parameters.get("norm", "l2") == norm:
                found.append(entry)
    return found[-1] if found else None


def draw_deepfool(axis: "Axes", runs: Mapping[str, Attacks], norm: str = "l2") -> None:
    """Draw the size of the perturbation that DeepFool needs, over the images sorted by it.

    The higher, the more robust.

    Args:
        axis: where to draw, an axis of matplotlib.
        runs: the attacks on each run by its name, as in `Run.attacks`.
        norm: that of the perturbations, "l2" or "linf".
    """
    found = {name: entry for name, attacks in runs.items() if (entry := deepfool_entry(attacks, norm)) is not None}
    if without := [name for name in runs if name not in found]:
        option = "deepfool" if norm == "l2" else f"deepfool:norm={norm}"
        raise ValueError(
            f"no DeepFool in the norm {norm} was run on {', '.join(without)}; run: dcnet attack RUN --attacks {option}"
        )
    shown_as = labels(found)
    for (name, entry), style in zip(found.items(), line_styles(), strict=False):
        sizes, attacked = entry["sizes"], entry.get("attacked", len(entry["sizes"]))
        # images that it did not fool have no size: they would stand to the right
        fooled = "" if len(sizes) == attacked else f" ({len(sizes)} of {attacked} fooled)"
        axis.plot(range(1, len(sizes) + 1), sizes, **style, linewidth=1.8, label=shown_as[name] + fooled)
    axis.set(
        xlabel="images classified right, sorted; a line ends with the last",
        ylabel=f"size of the perturbation ({'ℓ2' if norm == 'l2' else 'ℓ∞'}, pixels in [0, 1])",
        title="DeepFool",
        ylim=(0.0, None),
    )
    axis.grid(alpha=0.25)
    add_legend(axis)


def deepfool_figure(runs: Mapping[str, Attacks]) -> "Figure":
    """Draw DeepFool's perturbations in both norms side by side, where there are records."""
    norms = [
        norm for norm in ("l2", "linf") if any(deepfool_sizes(attacks, norm) is not None for attacks in runs.values())
    ] or ["l2"]
    figure, (axes,) = new_figure(1, len(norms), 5.0, 4.0 + room_below(len(runs)))
    for axis, norm in zip(axes, norms, strict=True):
        draw_deepfool(axis, runs, norm)
    return figure


def draw_eps(axis: "Axes", runs: Mapping[str, Attacks]) -> None:
    """Draw the accuracy under PGD as ε grows, from a check-up of each run at one ε.

    It must reach 0, where the line ends.

    Args:
        axis: where to draw, an axis of matplotlib.
        runs: the attacks on each run by its name, as in `Run.attacks`.
    """
    _, images = _draw_check_ups(
        axis, runs, lambda found: [(0.0, found["clean"]), *((255.0 * p["eps"], p["accuracy"]) for p in found["curve"])]
    )
    axis.set_xscale("symlog", linthresh=1.0, base=2)
    ticks = [0, 1, 2, 4, 8, 16, 32, 64, 255]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set(xlabel="ε · 255 (a line ends where nothing is left)", xlim=(0.0, 270.0), title=f"As ε grows: {images}")


def draw_steps(axis: "Axes", runs: Mapping[str, Attacks]) -> None:
    """Draw the accuracy under PGD as its steps grow, from a check-up of each run at one ε: it must level off.

    Args:
        axis: where to draw, an axis of matplotlib.
        runs: the attacks on each run by its name, as in `Run.attacks`.
    """
    eps, images = _draw_check_ups(
        axis, runs, lambda found: [(point["steps"], point["accuracy"]) for point in found["steps"]]
    )
    axis.set_xscale("log", base=10)
    axis.set(
        xlabel="steps of PGD (the last with restarts and another loss)",
        title=f"As steps grow: ε · 255 = {eps:g}, {images}",
    )


def _draw_check_ups(
    axis: "Axes", runs: Mapping[str, Attacks], points_of: Callable[[Any], list[tuple[float, float]]]
) -> tuple[float | None, str]:
    """Draw a line for each run; return the ε of the check-ups, times 255, and in words on how many images they rest."""
    eps, found = check_ups_of(runs)
    if without := [name for name in runs if name not in found]:
        at, option = ("", "") if eps is None else (f" at ε · 255 = {eps:g}", f" --eps {eps:g}/255")
        raise ValueError(f"no check-up was made of {', '.join(without)}{at}; run: dcnet attack RUN{option}")
    shown_as = labels(found)
    for (name, check_up), style in zip(found.items(), line_styles(), strict=False):
        points = points_of(check_up)
        axis.plot(*zip(*points, strict=True), **style, linewidth=1.8, marker="o", markersize=4, label=shown_as[name])
    axis.set(ylabel="accuracy under PGD (%)", ylim=(-3.0, 103.0))
    axis.grid(alpha=0.25)
    add_legend(axis)
    counts = sorted({check_up["images"] for check_up in found.values()})
    return eps, f"{counts[0]} images" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} images"


def curves_figure(runs: Mapping[str, Attacks]) -> "Figure":
    """Draw accuracy against ε, and against steps, of several runs."""
    figure, ((left, right),) = new_figure(1, 2, 5.0, 4.0 + room_below(len(runs)))
    draw_eps(left, runs)
    draw_steps(right, runs)
    return figure


def example_pictures(example: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the "image", the "change" and the "changed" image: each (H, W, C) in [0, 1].

    The change of ±ε is stretched to 0 … 1, with no change in the middle.

    Args:
        example: one of the examples that `dcnet.inspection.inspect_run` returns.
    """
    image, changed = (
        decoded(example[key], example["channels"], example["size"]).numpy().transpose(1, 2, 0)
        for key in ("image", "adversarial")
    )
    change = 0.5 + 0.5 * (changed - image) / max(example["eps"], 1e-12)
    return {"image": image.clip(0.0, 1.0), "change": change.clip(0.0, 1.0), "changed": changed.clip(0.0, 1.0)}


def example_captions(example: Mapping[str, Any], classes: Sequence[str]) -> dict[str, str]:
    """Return what stands above each of them: what the network says, with ✗ where that is wrong.

    Args:
        example: one of the examples that `dcnet.inspection.inspect_run` returns.
        classes: the names of the classes.
    """

    def said(what: Mapping[str, Any]) -> str:
        mark = "" if what["class"] == example["label"] else " ✗"
        return f"{classes[what['class']]} {100 * what['confidence']:.0f}%{mark}"

    return {
        "image": said(example["before"]),
        "change": f"± {255 * example['eps']:.3g}/255",
        "changed": said(example["after"]),
    }


def draw_example(axes: Sequence["Axes"], example: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Draw one image on three axes: as it is, the change, and both together; with the predictions.

    Args:
        axes: three axes of matplotlib.
        example: one of the examples that `dcnet.inspection.inspect_run` returns.
        classes: the names of the classes.
    """
    pictures, captions = example_pictures(example), example_captions(example, classes)
    for axis, (name, picture) in zip(axes, pictures.items(), strict=True):
        colors = SIGNED if name == "change" else "gray"
        axis.imshow(picture.squeeze(), cmap=colors, vmin=0.0, vmax=1.0, interpolation="nearest")
        axis.set_title(
            captions[name].replace(" ", "\n", 1) if name != "change" else captions[name], fontsize=8
        )  # long names run into each other
        axis.set(xticks=[], yticks=[])


def adversarial_figure(runs: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Draw images, perturbations and predictions, a row of examples for each run."""
    count = max((len(inspected["examples"]) for inspected in runs.values()), default=0)
    if count == 0:
        raise ValueError(f"{', '.join(runs)}: no image is classified right, so there is none to change")
    figure, axes = new_figure(3 * len(runs), count, 1.25, 1.55)
    for number, (name, inspected) in enumerate(runs.items()):
        rows = axes[3 * number : 3 * number + 3]
        for row, what in zip(rows, (f"{short(name)}\nimage", "change", "both"), strict=True):
            row[0].set_ylabel(what, fontsize=8)
        for column, example in enumerate(inspected["examples"]):
            draw_example([row[column] for row in rows], example, inspected["classes"])
        for row in rows:
            hide(row[max(1, len(inspected["examples"])) :])
            if not inspected["examples"]:  # its name stays
                row[0].set(xticks=[], yticks=[])
                row[0].text(
                    0.5, 0.5, "no image\nis right", ha="center", va="center", fontsize=7, transform=row[0].transAxes
                )
    return figure
