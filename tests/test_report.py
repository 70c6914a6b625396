"""The report: what it says, what it looks like in a browser, what it says is missing."""

import json
import re
import shutil
import time

import pytest
import torch
from browser import launch, watched
from helpers import attack_briefly
from typer.testing import CliRunner

import dcnet
from dcnet.cli import app
from dcnet.inspection import inspect_run
from dcnet.report import write_report
from dcnet.report.pictures import svg


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A plain network, and a decoupled one that was attacked."""
    folder = tmp_path_factory.mktemp("runs")
    options = {
        "steps": 60,
        "model": "cnn6_2d",
    }  # enough to be better than chance: an attack on a constant finds nothing
    plain = dcnet.train(dcnet.make_recipe("demo", magnitude=None, **options), folder / "plain", quiet=True)
    tanh = dcnet.train(
        dcnet.make_recipe("demo", magnitude="tanh", angular="sigmoid:k=learned", **options), folder / "tanh", quiet=True
    )
    attack_briefly(tanh)
    return [plain, tanh]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    return write_report([run.folder for run in runs], tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def browser():
    with launch() as browser:
        yield browser


def test_it_says_what_the_folders_say(page, runs):
    text = page.read_text()
    for run in runs:
        assert f"{run.result['accuracy']:.2f}%" in text
        assert f"{run.result['loss']:.4f}" in text
    entries = runs[1].attacks[0]["attacks"]
    assert f"{entries[0]['accuracy']:.2f}%" in text
    assert f"{entries[1]['median']:.4f}" in text
    assert runs[1].attacks[0]["check-up"]["verdict"] in text.replace("&#39;", "'")
    assert "sigmoid:k=learned" in text
    assert f"Not attacked yet. Run: dcnet attack {runs[0].folder}" in text
    differing = re.search(r'id="differences".*?</table>', text, re.DOTALL)[0]
    assert {"magnitude", "angular"} == set(re.findall(r"<code>(\w+)</code>", differing))
    assert text.count("data:image/png;base64,") >= 2 * 3
    assert re.search(r"PGD, 5 steps, ε · 255 = [\d.]+; above each", text)


def test_nothing_from_outside(page):
    addresses = re.findall(r"""(?:src|href)=["']([^"']*)""", page.read_text())
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "@import" not in page.read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_in_a_browser(page, browser, scheme, width):
    """Opens from disk, no complaint, no request; fits a phone; text stands out from what is behind it."""
    with watched(browser, page, viewport={"width": width, "height": 800}, color_scheme=scheme) as opened:
        assert opened.locator("h1").inner_text() == "Decoupled networks: 2 runs"
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.locator("figure svg").count() >= 5
        for picture in opened.locator("figure svg").all():
            assert picture.get_attribute("aria-label")
            assert picture.bounding_box()["height"] > 100
        colors = opened.evaluate(
            """[getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector("figure svg text")).fill,
                getComputedStyle(document.querySelector("td")).color]""",
        )
        light = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
        assert (light[0] > 600) == (scheme == "light")
        assert all(abs(light[0] - other) > 400 for other in light[1:])
        assert opened.evaluate(
            "new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size == "
            "document.querySelectorAll('[id]').length"
        )


def test_links_lead_to_their_run(page, browser):
    with watched(browser, page) as opened:
        opened.evaluate("document.querySelectorAll('details').forEach(d => d.open = false)")
        opened.get_by_role("link", name="tanh").click()
        details = "document.querySelector(location.hash).closest('details')"
        assert opened.evaluate(f"{details}.querySelector('summary').innerText").startswith("tanh")
        assert opened.evaluate(f"{details}.open")


def test_names_cannot_break_the_page(runs, tmp_path):
    evil = tmp_path / "<script>alert('x')&\"q"
    evil.mkdir()
    for name in ("recipe.json", "metrics.jsonl", "result.json"):
        (evil / name).write_text((runs[0].folder / name).read_text())
    text = write_report([evil], tmp_path / "out").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_an_unfinished_run(runs, tmp_path):
    folder = tmp_path / "young"
    folder.mkdir()
    (folder / "recipe.json").write_text((runs[0].folder / "recipe.json").read_text())
    text = write_report([folder, runs[1].folder], tmp_path / "page.html").read_text()
    assert "not finished" in text
    assert f"This run is not finished (epoch 0). Go on with: dcnet train --resume {folder}" in text
    assert f"No filters, angles and examples: {folder} has no checkpoint.safetensors" in text


def test_a_folder_that_cannot_be_written_to(runs, tmp_path):
    folder = tmp_path / "locked"
    shutil.copytree(runs[0].folder, folder)
    (folder / "inspection.json").unlink(missing_ok=True)
    (folder / ".inspection.json.part").mkdir()
    assert "kernels of stages.0" in write_report([folder], tmp_path / "out").read_text()


def attacked(folder, run, *results, attack="pgd"):
    """Return a copy of the run, with these records of attacks.

    accuracy, ε · 255, images, and changes of the check-up or None for none.
    """
    shutil.copytree(run.folder, folder)
    check_up = run.attacks[0]["check-up"]
    records = []
    for accuracy, eps, images, changes in results:
        entry = {"attack": attack, "attacked": images, "accuracy": accuracy, "seconds": 1.0}
        record = {
            "attacks": [entry],
            "eps": eps / 255,
            "labels": "true",
            "transfer": False,
            "images": images,
            "clean": 90.0,
        }
        records.append(record if changes is None else {**record, "check-up": {**check_up, "eps": eps / 255, **changes}})
    (folder / "attacks.json").write_text(json.dumps(records))
    return folder


BELIEVED = {
    "masked": False,
    "verdict": "to be believed",
    "images": 200,
    "pgd": 30.0,
    "pgd, stronger": 30.0,
    "square": 50.0,
    "tests": [],
}
MASKED = BELIEVED | {
    "masked": True,
    "verdict": "not to be believed",
    "tests": [{"test": "black box", "passed": False, "words": "it finds more"}],
}


def test_accuracy_and_verdict_are_of_one_set_up(runs, tmp_path):
    """At one ε for all runs, written out with the images; not the last record and its check-up, at another ε."""
    first = attacked(
        tmp_path / "first", runs[1], (30.0, 8, 1000, BELIEVED), (1.0, 64, 1000, MASKED), (99.0, 2, 1000, MASKED)
    )
    second = attacked(tmp_path / "second", runs[1], (40.0, 8, 1000, MASKED))
    third = attacked(tmp_path / "third", runs[1], (50.0, 16, 1000, None))
    fourth = attacked(tmp_path / "fourth", runs[1], (60.0, 8, 1000, BELIEVED))
    text = write_report([first, second, third, fourth], tmp_path / "out").read_text()
    table = re.search(r'<table class="results">.*?</table>', text, re.DOTALL)[0]
    rows = [" ".join(re.sub(r"<[^>]*>", " ", row).split()) for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)]
    assert "under attack ε·255 = 8" in rows[0]
    assert "30.00% 1,000 images, pgd" in rows[1]
    assert "believed" not in rows[1]
    assert "✗ 40.00% 1,000 images, pgd not to be believed: the check-up fails (black box)" in rows[2]
    assert "– only at ε·255 = 16" in rows[3]
    assert (
        "✗ 60.00% 1,000 images, pgd not to be believed: stronger attacks leave 30.0% of the 200 images of the check-up"
        in rows[4]
    )
    robustness = re.search(r'id="robustness".*?</table>', text, re.DOTALL)[0]
    marked = re.findall(r'title="not to be believed: [^"]*">✗</a> ([\d.]+)%', robustness)
    assert marked == ["1.00", "99.00", "40.00", "60.00"]
    verdicts = " ".join(re.sub(r"<[^>]*>", " ", text[text.index('id="believed"') :]).split())
    for words in (
        "first , ε·255 = 8, 200 images: to be believed.",
        "first , ε·255 = 64, 200 images: not to be believed.",
        "third : no check-up was made",
    ):
        assert words in verdicts
    assert "But not the 60.00% that pgd has left" in verdicts
    assert "As ε grows: 200 images" in text


@pytest.mark.parametrize("width", [390, 1400])
def test_the_result_table_fits(runs, browser, tmp_path, width):
    """Long names and a figure in doubt: nothing to scroll; on a phone the columns that matter, the rest on demand."""
    attack = "pgd:iterations=100:restarts=5:loss=margin"
    folders = [
        attacked(tmp_path / f"{name}-with-a-name-of-some-length", runs[1], (40.0, 8, 1000, MASKED), attack=attack)
        for name in ("tanh", "ball", "seg")
    ]
    page = write_report(folders, tmp_path / "out")
    with watched(browser, page, viewport={"width": width, "height": 900}) as opened:
        table = opened.locator("table.results")
        assert table.evaluate("t => t.scrollWidth <= t.parentElement.clientWidth")
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        shown = [head.inner_text().split("\n")[0] for head in table.locator("th").all() if head.is_visible()]
        assert shown[:3] == ["run", "accuracy", "under attack"]
        assert ("operator" in shown) == (width == 1400)
        rest = opened.locator("#columns table")
        assert not rest.is_visible()
        opened.get_by_text("All columns").click()
        assert rest.is_visible()
        assert {"operator", "network", "data", "loss", "device"} <= {
            head.inner_text() for head in rest.locator("th").all()
        }


def test_attacks_are_named_as_one_types_them(runs, tmp_path):
    folder = attacked(tmp_path / "one", runs[1], (40.0, 8, 1000, MASKED), attack="pgd:iterations=100:restarts=5")
    text = write_report([folder], tmp_path / "out").read_text()
    assert "iterations=" not in text
    assert text.count("pgd:<wbr>steps=100:<wbr>restarts=5") >= 2


@pytest.mark.parametrize("file", ["result.json", "attacks.json", "metrics.jsonl"])
def test_a_damaged_file_is_named(file, runs, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(runs[1].folder, folder)
    (folder / file).write_text('{"a": \n')
    with pytest.raises(ValueError, match=rf"{file} is damaged"):
        write_report([folder], tmp_path / "out")


def test_no_check_up(runs, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("recipe.json", "metrics.jsonl", "result.json"):
        (folder / name).write_text((runs[1].folder / name).read_text())
    attacks = [{key: value for key, value in runs[1].attacks[0].items() if key != "check-up"}]
    (folder / "attacks.json").write_text(json.dumps(attacks))
    assert "nothing says whether these figures can be believed" in write_report([folder], tmp_path / "out").read_text()


def test_the_command(runs, tmp_path):
    result = CliRunner().invoke(app, ["report", str(runs[0].folder), "-o", str(tmp_path / "here")])
    assert result.exit_code == 0
    assert (tmp_path / "here" / "index.html").is_file()
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "is not a run folder: it has no recipe.json" in " ".join(result.output.split())
    result = CliRunner().invoke(app, ["report", str(runs[0].folder), str(runs[0].folder / ".." / "plain")])
    assert "given more than once" in result.output


def test_where_it_cannot_be_written(runs, tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["report", str(runs[0].folder), "-o", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "is a file; possible: a folder, or a file ending in .html" in " ".join(result.output.split())


def test_a_picture_keeps_its_words():
    text = svg(lambda axis: axis.set(xlabel="0.123456", xlim=(0.0, 0.001)), 'a "label" & more')
    assert ">0.123456<" in text
    assert ">0.0002<" in text or ">0.00025<" in text  # a tick
    assert 'aria-label="a &quot;label&quot; &amp; more"' in text
    assert not re.search(r' d="[^"]*\d\.\d{3}', text)  # places are shortened


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_many_runs(runs, tmp_path, count):
    """Twenty in under 20 s on two cores, 5 MB at most."""
    torch.set_num_threads(2 if count == 20 else 1)
    folders = []
    for number in range(count):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        for file in runs[1].folder.iterdir():
            if file.name != "inspection.json":
                (folder / file.name).write_bytes(file.read_bytes())
        folders.append(folder)
    begun = time.perf_counter()
    path = write_report(folders, tmp_path / "report")
    if count == 20:
        assert time.perf_counter() - begun < 20.0
    assert path.stat().st_size < 250e3 * count
    assert "<details>" in path.read_text()  # closed, where there are many


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_many_deep_runs(runs, tmp_path, count):
    """Twenty runs as `dcnet train` leaves them: in under 20 s on two cores, 5 MB at most.

    Each of a network with 31 layers and 200 epochs.
    """
    torch.set_num_threads(2 if count == 20 else 1)
    inspected, last = inspect_run(runs[1]), runs[1].metrics[-1]
    names = [f"units.{number}.conv" for number in range(31)]
    inspected = {**inspected, "layers": [{**inspected["layers"][1], "name": name} for name in names]}
    folders = [tmp_path / f"run{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir()
        for file in ("recipe.json", "result.json", "attacks.json"):
            shutil.copy(runs[1].folder / file, folder)
        (folder / "inspection.json").write_text(json.dumps(inspected))
        with (folder / "metrics.jsonl").open("w") as file:
            for epoch in range(1, 201):
                learned = {
                    "radius": {
                        name: [0.1, 0.5, 1.0 + 0.01 * epoch * place, 2.0, 3.0] for place, name in enumerate(names)
                    }
                }
                file.write(json.dumps({**last, "epoch": epoch, "learned": learned}) + "\n")
    begun = time.perf_counter()
    path = write_report(folders, tmp_path / "report")
    if count == 20:
        assert time.perf_counter() - begun < 20.0
    assert path.stat().st_size < 250e3 * count


def test_cells_of_a_table_link_to_its_page(runs, tmp_path):
    """A page of tables beside the runs is named in their report; without one nothing is said."""
    cell = tmp_path / "tables" / "runs" / "cell"
    shutil.copytree(runs[0].folder, cell)
    assert "the paper's tables" not in write_report([cell], tmp_path / "report").read_text()
    (tmp_path / "tables" / "tables.html").write_text("")
    assert '<a href="../tables/tables.html">the paper' in write_report([cell], tmp_path / "report").read_text()
