"""The command line and the figures it draws."""

import pytest
from typer.testing import CliRunner

import dcnet
from dcnet.cli import app
from dcnet.figures import draw_functions


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_help_lists_the_catalogue():
    text = call("--help").output
    for name in [*dcnet.magnitudes(), *dcnet.angulars(), "figure"]:
        assert name in text
    assert dcnet.__version__ in call("--version").output


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_figure(tmp_path, ending):
    path = tmp_path / "sub" / f"curves.{ending}"
    result = call("figure", "functions", "--out", str(path))
    assert result.exit_code == 0
    assert path.stat().st_size > 5_000


def test_figure_errors(tmp_path):
    result = call("figure", "functons")
    assert result.exit_code == 2
    assert "Did you mean 'functions'" in result.output
    result = call("figure", "functions", "--out", str(tmp_path / "curves.bmp"))
    assert result.exit_code == 2
    assert "possible: .png, .svg, .pdf" in result.output


def test_a_users_formula_is_drawn_and_listed(catalogue):
    @dcnet.angular
    def mine(c):
        """half of cos θ"""
        return 0.5 * c, 0.5

    left, right = draw_functions().axes
    assert [line.get_label() for line in left.lines] == list(dcnet.magnitudes())
    assert [line.get_label() for line in right.lines][-1] == "mine"
    assert right.lines[-1].get_ydata()[0] == pytest.approx(0.5)
