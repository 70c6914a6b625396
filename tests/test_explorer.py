"""The explorer: its JavaScript against Python, and the command that writes its page."""

import inspect
import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from browser import launch
from own_formulas import register_own
from typer.testing import CliRunner

import dcnet
from dcnet import m
from dcnet.cli import explore
from dcnet.cli import own_formulas as own_formulas_option
from dcnet.explorer import arithmetic, render, to_javascript
from dcnet.formulas import look_up
from dcnet.ops.operator import WEIGHTINGS, make_operator

# -- the arithmetic ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    with launch() as browser:
        yield browser


def ask_node(function, data):
    script = f"{arithmetic()}\nconsole.log(JSON.stringify(({function})({json.dumps(data)})));"
    return json.loads(subprocess.run(["node", "-"], input=script, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(params=["node", "chromium"])
def ask(request):
    """ask(function, data): what a JavaScript function makes of the data, beside the catalogue registered now."""
    if request.param == "node":
        if not shutil.which("node"):
            pytest.skip("no comparison in Node: it is not installed")
        return ask_node
    chromium = request.getfixturevalue("chromium")

    def ask_chromium(function, data):
        page = chromium.new_page()
        page.add_script_tag(content=arithmetic())
        # as text: Playwright's own way takes seconds for this many numbers
        answer = page.evaluate(f"(text) => JSON.stringify(({function})(JSON.parse(text)))", json.dumps(data))
        page.close()
        return json.loads(answer)

    return ask_chromium


def draw(rng, parameter):
    """A random value a parameter may take."""
    low = parameter.range.low
    return rng.normal(scale=2.0) if math.isinf(low) else low + math.exp(rng.uniform(math.log(0.02), math.log(10.0)))


def arguments(rng, formula):
    """A random point: ‖x‖ or cos θ (now and then at an end), ρ, parameters."""
    end = rng.random() < 0.02
    first = (
        rng.choice([0.0, 1.0])
        if end
        else rng.uniform(0.0, 8.0)
        if formula.kind == "magnitude"
        else rng.uniform(-1.0, 1.0)
    )
    rho = [math.exp(rng.uniform(-3.0, 2.0))] if formula.has_radius else []
    return [float(first), *rho, *(draw(rng, parameter) for parameter in formula.parameters.values())]


def test_formulas_are_the_same_in_javascript(ask, catalogue):
    register_own()
    rng = np.random.default_rng(0)
    formulas = [formula for known in (dcnet.magnitudes(), dcnet.angulars()) for formula in known.values()]
    assert {"rational", "stretched", "rooted"} <= {formula.name for formula in formulas}
    questions = [{"kind": f.kind, "name": f.name, "points": [arguments(rng, f) for _ in range(1000)]} for f in formulas]
    answers = ask(
        "(questions) => questions.map(q => q.points.map(point => FORMULAS[q.kind][q.name].results(...point)))",
        questions,
    )
    for formula, question, answer in zip(formulas, questions, answers, strict=True):
        columns = torch.tensor(question["points"], dtype=torch.float64).unbind(1)
        results = [torch.as_tensor(result, dtype=torch.float64).expand(1000) for result in formula(*columns)]
        np.testing.assert_allclose(
            np.array(answer, float), torch.stack(results, 1).numpy(), rtol=1e-6, atol=1e-6, err_msg=formula.name
        )


def test_m_is_the_same_in_javascript(ask):
    rng = np.random.default_rng(1)
    questions = {
        name: rng.uniform(0.01, 0.99, (50, len(inspect.signature(getattr(m, name)).parameters))).tolist()
        for name in sorted(m.NAMES)
    }
    questions |= {
        name: [[-0.7], [0.0], [1.0], [-1.0], *questions[name]]
        for name in ("abs", "sign", "step", "tanh", "asin", "asin_slope")
    }
    questions["where"] = [[i % 2 == 0, a, b] for i, (_, a, b) in enumerate(questions["where"])]
    names, answers = ask(
        "(q) => [Object.keys(m), Object.keys(q).map(name => q[name].map(row => m[name](...row)))]", questions
    )
    assert set(names) == m.NAMES
    for (name, rows), answer in zip(questions.items(), answers, strict=True):
        assert answer == pytest.approx([getattr(m, name)(*row) for row in rows], rel=1e-12, abs=1e-15), name


def spec(name, values):
    return f"{name}:" + ",".join(f"{key}={value!r}" for key, value in values.items())


def test_operators_are_the_same_in_javascript(ask, catalogue):
    register_own()
    rng = np.random.default_rng(2)
    questions = []
    for magnitude in dcnet.magnitudes().values():
        for weighting in WEIGHTINGS if magnitude.uses_norm else WEIGHTINGS[:2]:
            for angular in dcnet.angulars().values():
                values = [
                    {p.name: draw(rng, p) for p in formula.parameters.values()} for formula in (magnitude, angular)
                ]
                vectors = {
                    "w": rng.normal(size=2).tolist(),
                    "x": rng.normal(size=2, scale=2.0).tolist(),
                    "rho": rng.uniform(0.1, 3.0),
                }
                questions.append(
                    {"names": [magnitude.name, angular.name], "values": values, "weighting": weighting, **vectors}
                )
    questions[0]["x"] = [0.0, 0.0]
    function = """(questions) => questions.map(({ names, values, weighting, w, x, rho }) => {
        const choice = (kind, i) => ({ formula: FORMULAS[kind][names[i]], values: values[i] });
        const [magnitude, angular] = ["magnitude", "angular"].map(choice);
        const operator = makeOperator({ magnitude, angular, weighting, rho, wNorm: Math.hypot(...w) });
        return [respond(operator, w, x), operator.h(Math.hypot(...x))];
    })"""
    for question, (response, h) in zip(questions, ask(function, questions), strict=True):
        magnitude, angular = map(spec, question["names"], question["values"])
        operator = make_operator(magnitude, angular, question["weighting"])
        w, x = (torch.tensor([question[name]], dtype=torch.float64) for name in "wx")
        options = {
            "magnitude": magnitude,
            "angular": angular,
            "weighting": question["weighting"],
            "eps": 0.0,
            "impl": "reference",
        }
        radius = question["rho"] if operator.magnitude.formula.has_radius else None
        expected = float(dcnet.decoupled_linear(x, w, radius=radius, **options))
        assert response == pytest.approx(expected, rel=1e-6, abs=1e-6), question
        assert h == pytest.approx(
            weighted_magnitude(operator, float(x.norm()), float(w.norm()), question["rho"]), rel=1e-6, abs=1e-6
        ), question


def weighted_magnitude(operator, n, w_norm, rho):
    """h(‖w‖, ‖x‖) and, by autograd, its slopes in ‖x‖, ρ and each learnable parameter: all as if they were learned."""
    choice = operator.magnitude
    names = choice.formula.learnable
    n, rho, *learned = (
        torch.tensor(v, dtype=torch.float64, requires_grad=True)
        for v in (n, rho, *(choice.value(name, 0.0) for name in names))
    )
    alpha = dict(zip(names, learned, strict=True)).get("alpha")
    if (
        operator.weighting == "separate" and alpha is not None
    ):  # the one case the package refuses: α is a factor, and so it is here
        unit = replace(
            operator, magnitude=replace(choice, values=tuple((k, 1.0 if k == "alpha" else v) for k, v in choice.values))
        )
        value = (
            alpha
            * unit.kernel_factor(torch.tensor(w_norm, dtype=torch.float64), rho, {})
            * unit.patch_magnitude(n, rho, {})[0]
        )
    else:
        values = tuple((name, value) for name, value in choice.values if name not in names)
        operator = replace(operator, magnitude=replace(choice, values=values, learned=names))
        given = dict(zip(names, learned, strict=True))
        value = operator.patch_magnitude(n * w_norm if operator.weighting == "joint" else n, rho, given)[0]
        factor = operator.kernel_factor(torch.tensor(w_norm, dtype=torch.float64), rho, given)
        value = (value if factor is None else factor * value) + 0.0 * n
    variables = [n, *([rho] if choice.formula.has_radius else []), *learned]
    slopes = torch.autograd.grad(value, variables, allow_unused=True)
    return [float(value.detach()), *(0.0 if slope is None else float(slope) for slope in slopes)]


def test_what_cannot_be_translated(catalogue, tmp_path):
    line = inspect.currentframe().f_lineno

    @dcnet.magnitude
    def squared(n):
        """‖x‖²"""
        twice = [2.0 * n]
        (slope,) = twice
        return n * n, slope

    message = r"magnitude 'squared' cannot be translated: '\[2\.0 \* n\]' \(List\) "
    message += rf"at line {line + 5} of .*test_explorer.py; possible: its arguments"
    with pytest.raises(ValueError, match=message):
        to_javascript(look_up("magnitude", "squared"))

    namespace = {"m": m}
    exec("def typed(c): return c * m.abs(c), 2.0 * m.abs(c)", namespace)
    dcnet.angular(namespace["typed"])
    message = "angular 'typed' cannot be translated: its source cannot be read, "
    message += "as it was defined in <string>; define it in a file"
    with pytest.raises(ValueError, match=message):
        to_javascript(look_up("angular", "typed"))

    file = tmp_path / "mine.py"
    file.write_text("import dcnet\n@dcnet.angular\ndef gone(c):\n    return c, 1.0\n")
    own_formulas_option.register([file])
    file.write_text("import dcnet\n\n@dcnet.angular\ndef gone(c):\n    return c, 1.0\n")
    with pytest.raises(ValueError, match=r"line 2 of .*mine.py has no 'def gone' \(any more\)"):
        to_javascript(look_up("angular", "gone"))


# -- the page as a file ------------------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).parent.parent / "docs" / "explorer.html"


def test_the_published_page_is_up_to_date():
    assert PUBLISHED.read_text(encoding="utf-8") == render(), (
        "run: python -m dcnet explore --out docs/explorer.html --no-open"
    )


def call(*options):
    app = typer.Typer()
    app.command()(explore.explore)
    return CliRunner().invoke(app, list(options), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_command(tmp_path, catalogue, monkeypatch):
    own, out = tmp_path / "my_formulas.py", tmp_path / "sub" / "page.html"
    own.write_text(
        'from dcnet import angular\n\n\n@angular\ndef cubed(c):\n    """cos³θ"""\n    return c * c * c, 3.0 * c * c\n',
        encoding="utf-8",
    )
    result = call("--out", str(out), "--no-open", "--formulas", str(own))
    assert result.exit_code == 0, result.output
    assert f"{out} written" in result.output
    assert '"cubed": {' in out.read_text(encoding="utf-8")
    opened = []
    monkeypatch.setattr(explore.webbrowser, "open", lambda url: opened.append(url))
    result = call()
    assert "no browser was found" in result.output
    assert opened[0].startswith("file:///")
    assert opened[0].endswith("explorer.html")


def test_command_errors(tmp_path, catalogue):
    broken, text = tmp_path / "broken.py", tmp_path / "formulas.txt"
    broken.write_text("import dcnet\n@dcnet.magnitude\ndef f(n):\n    return n * n, n\n")
    text.write_text("")
    for options, message in [
        (["--formulas", str(tmp_path / "none.py")], "none.py: there is no such file"),
        (["--formulas", str(broken)], "broken.py: ValueError: magnitude 'f': its slope in n is"),
        (["--formulas", str(text)], "formulas.txt: not a Python file; possible: a file that ends in .py"),
        (["--out", str(tmp_path)], "is a folder; possible: a file, such as"),
    ]:
        result = call("--no-open", *options)
        assert result.exit_code == 1, result.output
        assert message in result.output
