"""Figures: that they show the numbers they are given, and say what is missing."""

import io
import math
import sys

import numpy as np
import pytest
import torch
from helpers import attack_briefly, needs
from matplotlib.figure import Figure
from typer.testing import CliRunner

import dcnet
from dcnet import figures, m
from dcnet.cli import app
from dcnet.data import load_data
from dcnet.figures import FIGURES, make_figure
from dcnet.inspection import explained_examples
from dcnet.inspection.examples import decoded


@pytest.fixture
def axis():
    return Figure().subplots()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two short runs, one attacked."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"epochs": 2.0, "model": "cnn6_2d"}
    plain = dcnet.train(dcnet.make_recipe("demo", magnitude=None, **options), folder / "plain", quiet=True)
    tanh = dcnet.train(dcnet.make_recipe("demo", magnitude="tanh", **options), folder / "tanh", quiet=True)
    attack_briefly(tanh)
    return [plain, tanh]


def needs_attacks(name):
    return FIGURES[name].needs == "attacks"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(name, runs, tmp_path):
    if FIGURES[name].needs == "others":
        needs("captum")
    folders = (
        []
        if not FIGURES[name].needs
        else [str(run.folder) for run in (runs[1:] if needs_attacks(name) or name == "radius" else runs)]
    )
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        out = tmp_path / f"{name}{suffix}"
        result = CliRunner().invoke(app, ["figure", name, *folders, "-o", str(out), "--dpi", "30"])
        assert result.exit_code == 0, result.output
        assert out.read_bytes().startswith(start)
    for axis in make_figure(name, folders).axes:
        if axis.axison and axis.get_xticks().size and not axis.get_label().startswith("<colorbar>"):
            assert axis.get_xlabel(), f"{axis.get_title()} has no label"


@pytest.mark.parametrize("name", [name for name, kind in FIGURES.items() if kind.needs])
def test_a_folder_that_is_none(name, tmp_path):
    result = CliRunner().invoke(app, ["figure", name, str(tmp_path), "-o", str(tmp_path / "x.png")])
    assert result.exit_code == 1
    assert "is not a run folder: it has no recipe.json" in " ".join(result.output.split())
    result = CliRunner().invoke(app, ["figure", name])
    assert "needs one or more run folders" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("convergence", "has no metrics: its first epoch is not over. Go on with: dcnet train --resume"),
        ("radius", "has no metrics"),
        ("filters", "has no checkpoint.safetensors"),
        ("angles", "has no checkpoint.safetensors"),
        ("contributions", "has no checkpoint.safetensors, and so no network to explain"),
        ("deepfool", "was not attacked yet; run: dcnet attack"),
        ("curves", "was not attacked yet"),
    ],
)
def test_an_unfinished_folder(name, says, runs, tmp_path):
    (tmp_path / "recipe.json").write_text((runs[0].folder / "recipe.json").read_text())
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        make_figure(name, [tmp_path])


def test_other_refusals(runs, tmp_path):
    plain = runs[0].folder
    for name, folders, says in (
        ("functons", [], "unknown figure 'functons'. Did you mean 'functions'"),
        ("functions", [plain], "is of no run; given"),
        ("radius", [plain], "the metrics of plain have no learned radius"),
    ):
        with pytest.raises(ValueError, match=says):
            make_figure(name, folders)
    result = CliRunner().invoke(app, ["figure", "functions", "-o", str(tmp_path / "x.gif")])
    assert "possible: .png, .svg, .pdf" in " ".join(result.output.split())
    other = dcnet.train(dcnet.make_recipe("demo", steps=1), tmp_path / "nine", quiet=True)
    with pytest.raises(ValueError, match="nine has no two-dimensional features; train one with model=cnn6_2d"):
        make_figure("features", [other.folder])


def test_contributions_show_the_sum_that_is_the_logit(runs):
    found = explained_examples(runs[1])
    assert [example["label"] for example in found["examples"]] == [0, 1, 2, 3, 4, 5]
    # not of the images on the page, which are rounded: a ReLU that is nearly 0 may switch between the two
    test = load_data("digits").test
    images = torch.stack([test.images[test.labels == label][0] for label in range(6)]).float() / 255.0
    shown = torch.stack([decoded(example["image"], 1, example["size"]) for example in found["examples"]])
    torch.testing.assert_close(shown, images, rtol=0.0, atol=1e-3)
    exact = dcnet.explain(runs[1].model, images)
    assert [example["class"] for example in found["examples"]] == exact.target.tolist()
    for example, map_of in zip(found["examples"], exact.maps, strict=True):
        torch.testing.assert_close(torch.tensor(example["maps"]["contributions"]), map_of)
        pixels = sum(map(sum, example["maps"]["contributions"]))
        assert pixels + example["bias"] == pytest.approx(example["logit"], rel=1e-3, abs=1e-3)
        captions = figures.explanation_captions(example, found["classes"])
        assert captions["contributions"].startswith(f"pixels {pixels:+.1f}"[:-2])
        assert ("✗" in captions["image"]) == (example["class"] != example["label"])
    drawn = make_figure("contributions", [runs[1].folder]).axes
    assert len(drawn) == 12
    map_axis = next(axis for axis in drawn if "contributions" in axis.get_ylabel())
    shown = map_axis.images[0]
    np.testing.assert_allclose(shown.get_array(), found["examples"][0]["maps"]["contributions"], rtol=1e-4, atol=1e-6)
    low, high = shown.get_clim()
    assert low == -high  # nothing is in the middle


def test_explanations_without_captum(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum", None)
    result = CliRunner().invoke(app, ["figure", "explanations", str(runs[1].folder), "-o", str(tmp_path / "x.png")])
    assert result.exit_code == 1
    assert "pip install 'dcnet[explanations]'" in " ".join(result.output.split())
    assert not (tmp_path / "x.png").exists()


def test_a_users_formula_is_drawn(catalogue):
    @dcnet.magnitude
    def test_figures_root(n, alpha: dcnet.positive = 1.0):
        """α·√(1 + ‖x‖)"""
        r = m.sqrt(1.0 + n)
        return alpha * r, alpha * 0.5 / r

    assert "test_figures_root" in [axis.get_title() for axis in make_figure("geometry").axes]
    labels = [text.get_text() for text in make_figure("functions").axes[0].get_legend().get_texts()]
    assert "test_figures_root" in labels


def test_a_file_of_formulas(tmp_path, catalogue):
    file = tmp_path / "mine.py"
    file.write_text(
        'import dcnet\n\n@dcnet.angular\ndef halved(c):\n    """half of cos θ"""\n    return 0.5 * c, 0.5\n'
    )
    result = CliRunner().invoke(app, ["figure", "functions", "-o", str(tmp_path / "x.svg"), "--formulas", str(file)])
    assert result.exit_code == 0, result.output
    assert "halved" in dcnet.angulars()
    result = CliRunner().invoke(app, ["figure", "functions", "--formulas", str(tmp_path / "none.py")])
    assert "there is no such file" in " ".join(result.output.split())


def test_geometry_keeps_directions_and_bends_lengths(axis):
    figures.draw_geometry(axis, "ball", rho=1.0)
    before, after = (np.asarray(line.get_xydata()) for line in axis.lines[:2])
    lengths = np.linalg.norm(before, axis=1)
    assert np.allclose(np.linalg.norm(after, axis=1), np.minimum(lengths, 1.0))
    assert np.allclose(before * np.linalg.norm(after, axis=1, keepdims=True), after * lengths[:, None])


def test_response_is_the_operator(axis):
    figures.draw_response(axis, "seg", "square_cosine", farthest=3.0)
    values = axis.images[0].get_array()
    assert values[0, -1] == pytest.approx(2.0)  # ‖x‖ = 3, θ = 0: 0.5·3 + 0.5·1
    assert values[-1, -1] == pytest.approx(-2.0)
    assert abs(values[75, 100]) < 1e-6  # θ = π/2
    assert values[50, 50] == pytest.approx(math.cos(math.pi / 3) ** 2)  # ‖x‖ = 1


def test_plane_is_the_product_of_the_linear_operator(axis):
    figures.draw_plane(axis, "linear", "cosine", kernel=(3.0, 4.0), farthest=1.0)
    values = axis.images[0].get_array()
    assert values[100, 200] == pytest.approx(0.6, abs=1e-6)  # x = (1, 0): ‖x‖ cos θ
    assert values[200, 100] == pytest.approx(0.8, abs=1e-6)


def test_convergence_shows_the_metrics(axis, runs):
    figures.draw_convergence(axis, {"one": runs[0].metrics})
    train, test = axis.lines
    assert list(train.get_ydata()) == [entry["train_accuracy"] for entry in runs[0].metrics]
    assert list(test.get_ydata()) == [entry["test_accuracy"] for entry in runs[0].metrics]
    assert test.get_linewidth() > train.get_linewidth()


def test_correlation_of_orthogonal_kernels(axis):
    values = torch.eye(9).reshape(9, 1, 3, 3).tolist()
    figures.draw_correlation(axis, {"filters": {"name": "first.conv", "values": values}})
    assert np.allclose(axis.images[0].get_array(), np.eye(9))
    assert axis.get_title().endswith("off the diagonal 0.00")


def test_deepfool_of_each_norm(axis, runs):
    figures.draw_deepfool(axis, {"tanh": runs[1].attacks}, "linf")
    entries = runs[1].attacks[0]["attacks"]
    assert list(axis.lines[0].get_ydata()) == entries[2]["sizes"]
    assert (
        entries[1]["attacked"] == entries[2]["attacked"] >= entries[0]["attacked"]
    )  # all that are right, not the survivors of FGSM


def test_a_run_that_lacks_it_is_named(runs):
    (runs[0].folder / "attacks.json").write_text('[{"attacks": [], "transfer": false, "labels": "true"}]')
    try:
        for name, says in (
            ("deepfool", "no DeepFool in the norm l2 was run on plain;"),
            ("curves", "no check-up was made of plain at ε · 255 = 25.5; run: dcnet attack RUN --eps 25.5/255"),
            ("radius", "plain"),
        ):
            with pytest.raises(ValueError, match=says):
                make_figure(name, [run.folder for run in runs])
    finally:
        (runs[0].folder / "attacks.json").unlink()


def test_learned_parameters_are_thinned(axis):
    metrics = [{"epoch": epoch, "learned": {"radius": {"a": [0.0, 1.0, epoch, 3.0, 4.0]}}} for epoch in range(1, 301)]
    figures.draw_learned(axis, metrics)
    shown = axis.lines[0].get_xydata()
    assert len(shown) <= 80
    assert list(shown[0]) == [1, 1]
    assert list(shown[-1]) == [300, 300]
    assert len(axis.collections) == 1  # a band, as there is one layer


def test_deepfool_is_found_whatever_the_order_of_its_parameters(axis):
    attacks = [
        {
            "attacks": [
                {"attack": "deepfool:iterations=5:norm=linf", "sizes": [0.1]},
                {"attack": "deepfool:norm=l2", "sizes": [0.2, 0.3]},
            ]
        }
    ]
    figures.draw_deepfool(axis, {"one": attacks}, "linf")
    figures.draw_deepfool(axis, {"one": attacks}, "l2")
    assert [list(line.get_ydata()) for line in axis.lines] == [[0.1], [0.2, 0.3]]


def test_any_name_is_shown(axis, runs):
    names = ["_under", "a$32$b", r"f$\frac$"]
    figures.draw_convergence(axis, dict.fromkeys(names, runs[0].metrics))
    axis.figure.savefig(io.BytesIO(), format="svg")
    shown = [text.get_text().replace("\u200b", "").replace(r"\$", "$") for text in axis.get_legend().get_texts()]
    assert shown == names


def test_many_runs_can_be_told_apart(axis, runs):
    figures.draw_convergence(axis, {str(number): runs[0].metrics for number in range(25)})
    styles = {(line.get_color(), str(line._unscaled_dash_pattern), line.get_linewidth()) for line in axis.lines}
    assert len(styles) == len(axis.lines) == 50


def test_names_tell_runs_apart(tmp_path, runs):
    for where in ("a/same", "b/same"):
        (tmp_path / where).mkdir(parents=True)
        (tmp_path / where / "recipe.json").write_text((runs[0].folder / "recipe.json").read_text())
    found = [dcnet.training.Run(tmp_path / where) for where in ("a/same", "b/same")]
    assert figures.titles_of(found) == ["a/same", "b/same"]
    assert figures.titles_of(found[:1]) == ["same"]


def test_files_for_print(tmp_path):
    """The same figure gives the same bytes; png has 200 dots an inch unless asked otherwise."""
    for ending in ("svg", "pdf", "png"):
        first, second = (tmp_path / f"{number}.{ending}" for number in (1, 2))
        for path in (first, second):
            assert CliRunner().invoke(app, ["figure", "functions", "-o", str(path)]).exit_code == 0
        assert first.read_bytes() == second.read_bytes()
    assert b"<dc:date>" not in (tmp_path / "1.svg").read_bytes()
    header = (tmp_path / "1.png").read_bytes()
    assert int.from_bytes(header[16:20], "big") == 10 * 200  # ten inches
