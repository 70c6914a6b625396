"""What stands in the figures: each number in its place, with its sign and its unit."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

import dcnet
from dcnet import figures
from dcnet.figures import FIGURES
from dcnet.figures.layers import FARTHEST, filter_sheet, filters_figure, kernel_cosines
from dcnet.figures.robustness import adversarial_figure
from dcnet.inspection import adversarial_examples, inspect_run
from dcnet.inspection.examples import encoded

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def axis():
    return Figure().subplots()


def line(axis, name):
    (found,) = [line for line in axis.lines if line.get_label() == name]
    return found.get_xydata().T


def test_functions_are_values_not_slopes(axis):
    figures.draw_magnitudes(axis, rho=2.0)
    n, h = line(axis, "tanh")
    assert np.allclose(h, np.tanh(n / 2.0))
    assert n.max() == 6.0
    n, h = line(axis, "ball")
    assert np.allclose(h, np.minimum(n, 2.0) / 2.0)
    axis.clear()
    figures.draw_angulars(axis)
    theta, g = line(axis, "linear")
    assert np.allclose(g, 1.0 - 2.0 * theta / math.pi)
    theta, g = line(axis, "square_cosine")
    assert np.allclose(g, np.sign(np.cos(theta)) * np.cos(theta) ** 2)


@pytest.mark.parametrize("rho", [0.0, -1.0, math.inf, math.nan])
def test_a_radius_is_positive(axis, rho):
    with pytest.raises(ValueError, match="a radius is a positive number"):
        figures.draw_magnitudes(axis, rho)


def test_features_stand_with_their_class(axis):
    points = [[0.0, 1.0], [2.0, 0.0], [4.0, 0.0], [0.0, 3.0]]
    figures.draw_features(
        axis, {"classes": ["cat", "dog", "owl"], "features": {"points": points, "labels": [0, 1, 1, 0]}}, "run"
    )
    assert [part.get_offsets().tolist() for part in axis.collections] == [
        [points[0], points[3]],
        [points[1], points[2]],
    ]
    assert [[float(value) for value in part.xy] for part in axis.texts] == [[0.0, 2.0], [3.0, 0.0]]  # at the centers
    assert [part.get_text() for part in axis.texts] == ["cat", "dog"]  # of owls there is none
    assert [center.get_xydata().tolist() for center in axis.lines[:2]] == [[[0.0, 2.0]], [[3.0, 0.0]]]


def test_more_classes_than_colors(axis):
    names = [str(number) for number in range(12)]
    points = np.random.default_rng(0).normal(size=(12, 2)).tolist()
    figures.draw_features(axis, {"classes": names, "features": {"points": points, "labels": list(range(12))}})
    first, eleventh = axis.collections[0], axis.collections[10]
    assert np.allclose(first.get_facecolor(), eleventh.get_facecolor())
    assert len(first.get_paths()[0]) != len(eleventh.get_paths()[0])  # another marker


def layer(name, theta=(), norm=(), **more):
    counts = {"theta": np.zeros(60), "norm": np.zeros(60)}
    counts["theta"][list(theta)] = 2
    counts["norm"][list(norm)] = 4
    return {"name": name, **{key: value.tolist() for key, value in counts.items()}, **more}


def test_angles_run_from_0_to_pi_and_layers_downwards(axis):
    figures.draw_angles(axis, {"layers": [layer("a.conv", theta=[0]), layer("b", theta=[59, 58])]}, bar=False)
    picture = axis.images[0]
    assert picture.get_extent() == [0.0, math.pi, 1.5, -0.5]
    assert picture.get_array()[0].tolist() == [1.0] + [0.0] * 59
    assert picture.get_array()[1].tolist() == [0.0] * 58 + [1.0, 1.0]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "b"]
    assert list(axis.get_yticks()) == [0, 1]
    assert list(axis.lines[0].get_xdata()) == [math.pi / 2] * 2


def test_radii_lie_on_their_layer(axis):
    layers = [
        layer("a", norm=[3]),
        layer("b", norm=[4], radius=[0.5, 0.8, 1.0, 1.5, 2.0]),
        layer("c", radius=[0.1, 1.0, 2.0, 3.0, 7.0]),
    ]
    figures.draw_norms(axis, {"layers": layers}, bar=False)
    assert axis.images[0].get_extent() == [0.0, FARTHEST, 2.5, -0.5]
    assert axis.images[0].get_array()[1].tolist() == [0.0] * 4 + [1.0] + [0.0] * 55
    for bars in axis.collections:
        assert [segment.tolist() for segment in bars.get_segments()] == [
            [[0.5, 1], [2.0, 1]],
            [[0.1, 2], [FARTHEST, 2]],
        ]
    marks = {line.get_marker(): line.get_xydata().tolist() for line in axis.lines}
    assert marks["|"] == [[1.0, 1], [2.0, 2]]
    assert [row for _, row in marks[">"]] == [2]  # goes on beyond the axis
    words = axis.get_xlabel()  # what the bars span, and what the arrow means
    assert "bars: radii of the layer's kernels,\nleast | median | greatest; ▸ beyond 3" in words
    axis.clear()
    figures.draw_norms(axis, {"layers": [layer("a", norm=[3])]}, bar=False)
    assert axis.get_xlabel() == "‖x‖ / E{‖x‖}"  # without radii there are no bars


def test_learned_is_the_median_in_the_middle_half(axis):
    metrics = [
        {"epoch": epoch, "learned": {"radius": {"a.conv": [0.0, 1.0 * epoch, 2.0 * epoch, 3.0 * epoch, 99.0]}}}
        for epoch in (1, 2, 3)
    ]
    figures.draw_learned(axis, metrics)
    assert axis.lines[0].get_xydata().tolist() == [[1, 2.0], [2, 4.0], [3, 6.0]]
    band = {tuple(point) for point in axis.collections[0].get_paths()[0].vertices.tolist()}
    assert {(1.0, 1.0), (3.0, 3.0), (1.0, 3.0), (3.0, 9.0)} <= band
    assert max(y for _, y in band) == 9.0


def test_of_many_layers_some_are_named(axis):
    metrics = [{"epoch": epoch, "learned": {"radius": {f"u{n}": [1.0] * 5 for n in range(31)}}} for epoch in (1, 2)]
    figures.draw_learned(axis, metrics)
    assert len(axis.lines) == 31
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [f"u{n}" for n in range(0, 31, 3)]


def test_kernels_keep_their_sign():
    kernels = torch.zeros(3, 1, 2, 2)
    kernels[0, 0, 0, 0], kernels[0, 0, 1, 1], kernels[1], kernels[2, 0, 0, 0] = 4.0, -2.0, 1.0, -1.0
    found = {"filters": {"name": "a", "values": kernels.tolist()}}
    sheet = filter_sheet(found)[..., 0]
    assert sheet[1:3, 1:3].tolist() == [[1.0, 0.5], [0.5, 0.25]]
    assert np.isnan(sheet[0]).all()
    assert kernel_cosines(found)[0, 2] == pytest.approx(-4.0 / math.sqrt(20.0))
    assert kernel_cosines(found)[0, 1] == pytest.approx(2.0 / math.sqrt(20.0) / 2.0)


def test_check_ups_in_units_of_255(axis):
    check_up = {
        "clean": 90.0,
        "eps": 8 / 255,
        "images": 200,
        "curve": [{"eps": 8 / 255, "accuracy": 40.0}, {"eps": 1.0, "accuracy": 0.0}],
        "steps": [{"steps": 1, "accuracy": 60.0}, {"steps": 100, "accuracy": 39.0}],
    }
    records = [record(check_up | {"curve": []}), record(check_up), record(None)]
    figures.draw_eps(axis, {"one": records})
    assert np.allclose(axis.lines[0].get_xydata(), [[0.0, 90.0], [8.0, 40.0], [255.0, 0.0]])
    assert axis.get_title() == "As ε grows: 200 images"
    assert "a line ends where nothing is left" in axis.get_xlabel()
    axis.clear()
    figures.draw_steps(
        axis, {"one": records, "two": [record(check_up | {"images": 50}), record(check_up | {"eps": 0.5, "steps": []})]}
    )
    assert axis.lines[0].get_xydata().tolist() == [[1, 60.0], [100, 39.0]]
    assert len(axis.lines[1].get_xydata()) == 2  # at the ε that both have
    assert axis.get_title() == "As steps grow: ε · 255 = 8, 50 to 200 images"


def record(check_up):
    """A record of attacks with that check-up."""
    found = {"attacks": [], "transfer": False, "labels": "true"}
    return found if check_up is None else found | {"check-up": check_up}


def test_no_curve_hides_another(axis):
    """Where two coincide the one below is wider than the one on it, and seen through its gaps; a twin is called one."""
    figures.draw_angulars(axis)
    drawn = {line.get_label().split(" ")[0]: line for line in axis.lines}
    for below, above in (("square_cosine", "power_cosine"), ("cosine", "relu_cosine")):
        assert list(drawn).index(below) < list(drawn).index(above)
        assert drawn[below].get_linewidth() > 2 * drawn[above].get_linewidth()
        assert drawn[above].get_linestyle() != "-"
    assert drawn["power_cosine"].get_label() == "power_cosine = square_cosine"


@pytest.mark.parametrize(("count", "grid"), [(64, (8, 8)), (32, (4, 8)), (96, (8, 12)), (1, (1, 1)), (13, (2, 7))])
def test_the_last_row_of_kernels_is_full(count, grid):
    """Or, of a prime number, as full as can be."""
    kernels = torch.ones(count, 3, 2, 2)
    height, width, _ = filter_sheet({"filters": {"name": "a", "values": kernels.tolist()}}).shape
    assert ((height - 1) // 3, (width - 1) // 3) == grid


def test_titles_stay_within_the_figure():
    """Those of kernels and their cosines do not run into each other."""
    kernels = torch.randn(64, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    figure = filters_figure({"run": {"filters": {"name": "stages.0.conv", "values": kernels.tolist()}}})
    figure.draw_without_rendering()
    left, right = (axis.title.get_window_extent() for axis in figure.axes[:2])
    assert left.x1 < right.x0
    assert right.x0 > figure.axes[1].get_window_extent().x0 - 10
    assert right.x1 < figure.bbox.x1


def test_a_color_bar_can_be_read(axis):
    """At most five short numbers in 9 points, and what they are above them."""
    figures.draw_plane(axis, "seg", "square_cosine")
    bar = axis.figure.axes[-1]
    axis.figure.draw_without_rendering()
    texts = [text for text in bar.get_yticklabels() if text.get_text()]
    assert len(texts) == 5
    assert all(len(text.get_text()) <= 4 and text.get_fontsize() >= 9 for text in texts)
    assert (bar.get_title(), bar.get_ylabel()) == ("f", "")


def example(**changes):
    image = torch.full((1, 2, 2), 0.5)
    changed = image + torch.tensor([[[0.1, -0.1], [0.0, 0.05]]])
    return {
        "image": encoded(image),
        "adversarial": encoded(changed),
        "channels": 1,
        "size": 2,
        "eps": 0.1,
        "label": 1,
        "before": {"class": 1, "confidence": 0.987},
        "after": {"class": 0, "confidence": 0.5},
        **changes,
    }


def test_an_example_and_its_words():
    pictures = figures.example_pictures(example())
    assert np.allclose(pictures["change"][..., 0], [[1.0, 0.0], [0.5, 0.75]], atol=0.01)
    assert np.allclose(pictures["changed"][..., 0], [[0.6, 0.4], [0.5, 0.55]], atol=0.001)
    assert figures.example_captions(example(), ["cat", "dog"]) == {
        "image": "dog 99%",
        "change": "± 25.5/255",
        "changed": "cat 50% ✗",
    }
    still = example(after={"class": 1, "confidence": 0.7}, before={"class": 0, "confidence": 0.6})
    assert figures.example_captions(still, ["cat", "dog"]) == {
        "image": "cat 60% ✗",
        "change": "± 25.5/255",
        "changed": "dog 70%",
    }


def test_a_run_without_examples_keeps_its_name():
    figure = adversarial_figure(
        {
            "good": {"examples": [example()], "classes": ["cat", "dog"]},
            "bad": {"examples": [], "classes": ["cat", "dog"]},
        }
    )
    shown = [axis.get_ylabel() for axis in figure.axes if axis.axison and axis.get_ylabel()]
    assert shown == ["good\nimage", "change", "both", "bad\nimage", "change", "both"]
    with pytest.raises(ValueError, match="good, bad: no image is classified right"):
        adversarial_figure({name: {"examples": [], "classes": []} for name in ("good", "bad")})


def test_those_that_are_fooled_come_first():
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False)).eval().requires_grad_(False)
    model[1].weight.copy_(torch.tensor([[-1.0], [1.0]]))
    model[1].register_forward_pre_hook(lambda layer, inputs: inputs[0] - 0.5)
    images = torch.tensor([0.9, 0.1, 0.55, 0.45]).reshape(4, 1, 1, 1)
    found = adversarial_examples(model, images, torch.tensor([1, 0, 1, 0]), eps=0.1)
    assert [entry["after"]["class"] == entry["label"] for entry in found] == [False, False, True, True]
    assert all(entry["before"]["class"] == entry["label"] for entry in found)


def test_eps_of_gray_images_and_of_a_callers_choice(tmp_path):
    run = dcnet.train(dcnet.make_recipe("demo", steps=1), tmp_path / "one", quiet=True)
    assert inspect_run(run)["eps"] == 0.1
    assert inspect_run(run, eps=0.2)["eps"] == 0.2


def test_the_gallery_shows_every_figure():
    text = (DOCS / "figures.md").read_text()
    for name in FIGURES:
        (ending,) = re.findall(rf"dcnet figure {name}\b[^`]*-o docs/{name}\.(svg|png)", text)
        assert f"]({name}.{ending})" in text
        start = (DOCS / f"{name}.{ending}").read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if ending == "png" else b"<!DOCTYPE svg" in start
    # `dcnet table --picture` draws one more, see test_tables_picture.py
    assert {path.stem for path in DOCS.iterdir() if path.suffix in (".svg", ".png")} == {*FIGURES, "reproduction"}


def test_a_long_legend_stands_below(axis):
    metrics = [{"epoch": epoch, "test_accuracy": 50.0 + epoch} for epoch in (1, 2)]
    figures.draw_convergence(axis, {f"run {number}": metrics for number in range(8)})
    drawn = FigureCanvasAgg(axis.figure).get_renderer()
    assert axis.get_legend().get_window_extent(drawn).y0 > axis.get_window_extent(drawn).y0
    axis.clear()
    figures.draw_convergence(axis, {f"run {number}": metrics for number in range(9)})
    axis.figure.draw(drawn)
    assert axis.get_legend().get_window_extent(drawn).y1 < axis.xaxis.label.get_window_extent(drawn).y0


def test_runs_that_are_points_and_runs_not_tested_yet(axis):
    runs = {f"run {number}": [{"epoch": 1, "train_accuracy": 1.0, "test_accuracy": 50.0}] for number in range(3)}
    figures.draw_convergence(axis, runs | {"early": [{"epoch": epoch, "train_accuracy": 10.0} for epoch in (1, 2)]})
    shown = [line for line in axis.lines if not line.get_label().startswith("_")]
    assert [line.get_label() for line in shown] == [*runs, "early"]
    assert len({line.get_marker() for line in shown[:3]}) == 3


def test_of_a_long_name_both_ends_are_shown(axis):
    figures.draw_convergence(axis, {"begin" + "x" * 80 + "end": [{"epoch": 1, "test_accuracy": 50.0}]})
    (text,) = axis.get_legend().get_texts()
    assert text.get_text().startswith("begin")
    assert text.get_text().endswith("end")
    assert len(text.get_text()) <= 32


def test_of_long_names_what_tells_them_apart_is_shown(axis):
    entry = [{"epoch": 1, "test_accuracy": 50.0}]
    ends = "a-very-long-beginning", "and-an-end-that-all-have-in-common"
    names = ["-".join((ends[0], middle, ends[1])) for middle in ("plain", "tanh-cosine", "tanh")]
    figures.draw_convergence(axis, dict.fromkeys(names, entry))
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["plain", "tanh-cosine", "tanh"]
    axis.clear()
    figures.draw_convergence(axis, dict.fromkeys(["short", "names"], entry))
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["short", "names"]
    axis.clear()
    longer = f"{names[0]}-2"  # begins with another name
    figures.draw_convergence(axis, dict.fromkeys([names[0], longer], entry))
    assert len({text.get_text() for text in axis.get_legend().get_texts()}) == 2
