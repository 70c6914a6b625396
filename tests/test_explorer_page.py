"""The explorer's page in a headless Chromium: what it draws, what it copies, and on a phone."""

import math

import pytest
import torch
from browser import launch, watched
from own_formulas import register_own
from torch.testing import assert_close

import dcnet
from dcnet.explorer import render
from dcnet.formulas import choose
from dcnet.layers.options import LayerOptions
from dcnet.ops.operator import WEIGHTINGS

PLOTS = ("h-plot", "g-plot", "response-plot", "plane-plot")
WINDOW = {"viewport": {"width": 1200, "height": 900}}


@pytest.fixture(scope="module")
def chromium():
    with launch() as browser:
        yield browser


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(render(), encoding="utf-8")
    return path


@pytest.fixture
def page(chromium, file):
    with watched(chromium, file, **WINDOW) as page:
        yield page


def go(page, address):
    page.evaluate("(address) => open(address)", address)


def settled(page):
    """Waits until the page has drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def pictures(page):
    """For every plot a fingerprint of its pixels and one of the numbers behind it."""
    settled(page)
    prints = page.evaluate(
        """(ids) => {
            const print = (array) => array.reduce((sum, value) => (Math.imul(sum, 31) + value) | 0, 7);
            const numbers = [drawn.h, drawn.g, [drawn.across, drawn.down], [[...drawn.plane]]]; // behind each plot
            return ids.map((id, i) => [
                print(new TextEncoder().encode(element(id).toDataURL())),
                print(new Uint32Array(Float64Array.from(numbers[i].flat()).buffer)),
            ]);
        }""",
        PLOTS,
    )
    return dict(zip(PLOTS, prints, strict=True))


def changes(before, after):
    """The plots of which both pixels and numbers changed."""
    return {plot for plot in PLOTS if all(a != b for a, b in zip(before[plot], after[plot], strict=True))}


def line(page):
    return page.locator("#line").inner_text()


def build(text):
    assert text.startswith("dcnet.DecoupledConv2d(64, 128, 3, padding=1, ")
    return eval(text, {"dcnet": dcnet})


H, G, RESPONSES = "h-plot", "g-plot", {"response-plot", "plane-plot"}


def test_every_control_changes_its_curves(page):
    for start, control, value, changing in [
        ("", "magnitude", "seg", {H} | RESPONSES),
        ("", "angular", "linear", {G} | RESPONSES),
        ("wNorm=1.7", "weighting", "linear", {H} | RESPONSES),
        ("weighting=joint", "wNorm", "1.3", {H} | RESPONSES),
        ("weighting=separate", "wNorm-slider", "0.4", {H} | RESPONSES),
        ("magnitude=sphere", "magnitude-alpha-slider", "1.3", {H} | RESPONSES),
        ("magnitude=mix", "magnitude-beta", "-0.7", {H} | RESPONSES),
        ("magnitude=ball", "radius-slider", "1.6", {H} | RESPONSES),
        ("angular=sigmoid", "angular-k-slider", "0.8", {G} | RESPONSES),
        ("angular=power_cosine", "angular-p", "1", {G} | RESPONSES),
        ("", "reach-slider", "5", {H} | RESPONSES),
    ]:
        go(page, start)
        before = pictures(page)
        assert len({tuple(prints) for prints in before.values()}) == 4
        locator = page.locator(f"#{control}")
        if locator.evaluate("(e) => e.tagName") == "SELECT":
            locator.select_option(value)
        else:
            locator.fill(value)
        assert changes(before, pictures(page)) == changing, control


def test_the_pictures_show_the_package_numbers(page):
    go(
        page,
        "magnitude=seg&magnitude.beta=0.2&radius=1.5&angular=sigmoid&angular.k=0.4&weighting=linear&wNorm=2&wAngle=1",
    )
    settled(page)
    drawn = page.evaluate("() => ({ ...drawn, plane: [...drawn.plane], operator: null })")
    n, theta = (torch.tensor(drawn[name], dtype=torch.float64) for name in ("n", "theta"))
    h = [2.0 * v for v in choose("magnitude", "seg:beta=0.2")(n, torch.full_like(n, 1.5))]
    value, slope, in_k = choose("angular", "sigmoid:k=0.4")(theta.cos())
    assert_close(torch.tensor(drawn["h"], dtype=torch.float64), torch.stack(h))
    assert_close(torch.tensor(drawn["g"], dtype=torch.float64), torch.stack([value, -theta.sin() * slope, in_k]))
    # the plane from its upper left corner on, row by row
    cells = len(drawn["across"])
    places = (2.0 * (torch.arange(cells, dtype=torch.float64) + 0.5) / cells - 1.0) * 3.0
    x = torch.stack(torch.meshgrid(-places, places, indexing="ij")[::-1], -1)
    w = torch.tensor([[2.0 * math.cos(1.0), 2.0 * math.sin(1.0)]], dtype=torch.float64)
    options = {
        "magnitude": "seg:beta=0.2",
        "angular": "sigmoid:k=0.4",
        "weighting": "linear",
        "radius": 1.5,
        "eps": 0.0,
        "impl": "reference",
    }
    assert_close(torch.tensor(drawn["plane"], dtype=torch.float64), dcnet.decoupled_linear(x, w, **options).flatten())
    # orange where the response is positive: toward w, and at θ = 0, which is below
    colors = page.evaluate("""() => {
        const read = (id, ...points) => {
            const { width, height } = element(id);
            const { data } = element(id).getContext("2d").getImageData(0, 0, width, height);
            const place = ([across, down]) => 4 * (Math.round(down * height) * width + Math.round(across * width));
            return points.map((point) => [...data.slice(place(point)).slice(0, 3)]);
        };
        return [...read("plane-plot", [0.7, 0.1], [0.3, 0.75]), ...read("response-plot", [0.7, 0.8], [0.7, 0.15])];
    }""")
    assert [red > blue for red, _, blue in colors] == [True, False, True, False]


def test_contours_stand_where_the_values_are(page):
    """Of a ramp from −60 to 60: a line at every quarter of the limit, broken where negative."""
    inked = page.evaluate("""() => {
        const context = new OffscreenCanvas(480, 480).getContext("2d");
        const box = { left: 0, top: 0, width: 480, height: 480 };
        drawContours(context, box, 120, 120, (column) => column + 0.5 - 60, 80);
        const { data } = context.getImageData(0, 0, 480, 480);
        const across = [...Array(480).keys()];
        return across.map((x) => across.filter((y) => data[4 * (480 * y + x) + 3] > 20).length);
    }""")
    lines = {x: count for x, count in enumerate(inked) if count}
    assert {round(x / 80) for x in lines} == {1, 2, 3, 4, 5}
    assert all(abs(x + 0.5 - round(x / 80) * 80) <= 1 for x in lines)
    assert all(count > 470 if x > 200 else 100 < count < 380 for x, count in lines.items())


def test_the_address_holds_the_setting(page, chromium, file):
    for select, option in [("magnitude", "seg"), ("angular", "sigmoid"), ("weighting", "joint")]:
        page.locator(f"#{select}").select_option(option)
    for field, value in [("magnitude-beta", "-0.25"), ("wNorm", "1.7"), ("radius", "2.5")]:
        page.locator(f"#{field}").fill(value)
    page.locator("#angular-k-learned").check()
    assert page.locator("#angular-k").input_value() == "0.75"  # where it starts
    assert not page.locator("#radius-learned").is_checked()  # a number was given
    page.locator("#handle-x").press("ArrowLeft")
    page.wait_for_function("() => location.hash.includes('x=')")
    assert line(page).endswith(
        'magnitude="seg:beta=-0.25", angular="sigmoid:k=learned", weighting="joint", radius=2.5)'
    )
    with watched(chromium, file, page.evaluate("() => location.hash"), **WINDOW) as other:
        assert line(other) == line(page)
        page.mouse.move(0, 0)
        page.locator("#handle-x").blur()
        assert pictures(other) == pictures(page)
        other.evaluate("() => { location.hash = '#magnitude=tan&wNorm=-1&x=1&angular.k=2&reach=nan&radius=learnd' }")
        other.wait_for_function("() => element('note').textContent")
        note = other.locator("#note").inner_text()
        for words in (
            "magnitude=tan is not one of sphere, ball",
            "wNorm=-1 is not a number > 0",
            "angular.k is not known",
            "x=1 is not two numbers",
            "radius=learnd is not a number > 0, or learned",
        ):
            assert words in note
        assert line(other).endswith('magnitude="tanh", angular="cosine")')
        other.locator("#reset").click()
        assert other.locator("#note").inner_text() == ""
        assert line(other).endswith('magnitude="tanh", angular="cosine")')


def test_dragging(page):
    go(page, "weighting=linear")
    before = pictures(page)
    handle, plane = page.locator("#handle-w").bounding_box(), page.locator("#plane-plot").bounding_box()
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
    page.mouse.move(handle["x"] + 4, handle["y"] + handle["height"] / 2, steps=3)  # over it, not pressed
    assert changes(before, pictures(page)) == set()
    page.mouse.down()
    page.mouse.move(plane["x"] + 0.3 * plane["width"], plane["y"] + 0.3 * plane["height"], steps=3)
    page.mouse.up()
    dragged = pictures(page)
    assert changes(before, dragged) == {H} | RESPONSES  # ‖w‖ changed with its direction
    assert float(page.locator("#wNorm").input_value()) == pytest.approx(
        page.evaluate("() => Math.hypot(...drawn.w)"), abs=1e-3
    )
    page.mouse.move(plane["x"] + 0.5 * plane["width"], plane["y"] + 0.7 * plane["height"])  # let go: nothing follows
    assert changes(dragged, pictures(page)) == set()
    page.locator("#handle-w").press("ArrowLeft")
    assert changes(dragged, pictures(page)) == {"plane-plot"}
    words = page.locator("#readout").inner_text()
    page.mouse.click(plane["x"] + 0.5 * plane["width"], plane["y"] + 0.6 * plane["height"])  # x goes there
    settled(page)
    assert page.locator("#readout").inner_text() != words
    # without a weighting only the direction of w counts
    go(page, "")
    before = pictures(page)
    page.locator("#handle-w").press("ArrowUp")
    assert changes(before, pictures(page)) == set()


# Every combination the page lets one choose: its line at the start, with every field filled, and with all that can be
# learned.
EVERY_LINE = """() => {
    const select = (id, value) => { element(id).value = value; element(id).dispatchEvent(new Event("change")); };
    const enabled = (id) => [...element(id).options].filter((option) => !option.disabled).map((option) => option.value);
    const found = [];
    for (const magnitude of enabled("magnitude")) for (const angular of enabled("angular")) {
        select("magnitude", magnitude);
        for (const weighting of enabled("weighting")) {
            element("reset").click();
            Object.entries({ magnitude, angular, weighting }).forEach(([id, value]) => select(id, value));
            const choice = [magnitude, angular, setting.weighting];
            const entry = { choice, plain: element("line").textContent, fields: {} };
            for (const field of document.querySelectorAll(".controls input[type=number]")) {
                field.value = entry.fields[field.id] = Number((1.01 + Math.random()).toFixed(3));
                field.dispatchEvent(new Event("input"));
            }
            entry.filled = element("line").textContent;
            const learned = [...document.querySelectorAll("[id$=-learned]")];
            for (const { id } of learned) element(id).checked || element(id).click();
            found.push({ ...entry, learned: element("line").textContent });
        }
    }
    return found;
}"""


def accepted(*options):
    try:
        LayerOptions(*options).operator()
    except ValueError:
        return False
    return True


def test_the_line_builds_every_layer_and_no_other(page):
    found = page.evaluate(EVERY_LINE)
    possible = {
        (h, g, weighting)
        for h in dcnet.magnitudes()
        for g in dcnet.angulars()
        for weighting in WEIGHTINGS
        if accepted(h, g, weighting)
    }
    assert {tuple(entry["choice"]) for entry in found} == possible
    for entry in found:
        magnitude, angular, weighting = entry["choice"]
        plain, filled, learned = (build(entry[name]) for name in ("plain", "filled", "learned"))
        assert (plain.magnitude, plain.angular, plain.weighting, plain.radius) == (
            magnitude,
            angular,
            weighting,
            "learned",
        )
        for kind in ("magnitude", "angular"):
            choice = getattr(filled.operator, kind)
            assert dict(choice.values) == {
                name: entry["fields"][f"{kind}-{name}"] for name in choice.formula.parameters
            }
        assert filled.radius == entry["fields"].get("radius", "learned")
        assert learned.operator.learned == dcnet.angulars()[angular].learnable
        assert (filled.weighting, learned.weighting, learned.radius) == (weighting, weighting, "learned")


def test_what_the_package_refuses_cannot_be_chosen(chromium, tmp_path, catalogue):
    register_own()
    path = tmp_path / "own.html"
    path.write_text(render(), encoding="utf-8")
    with watched(chromium, path) as page:
        page.locator("#weighting").select_option("joint")
        page.locator("#magnitude").select_option("sphere")
        assert "the magnitude 'sphere' has none to bend" in page.locator("#note").inner_text()
        assert page.locator("#weighting option:disabled").all_text_contents() == ["joint", "separate"]
        assert "possible here: None, 'linear'" in page.locator("#weighting-reason").inner_text()
        assert build(line(page)).weighting is None
        assert page.locator("#radius").count() == 0
        # both formulas could learn a parameter called new, but not at the same time
        page.locator("#magnitude").select_option("rational")
        assert page.locator("#magnitude-text").inner_text().endswith("‖x‖ </script><!-- <b>; unbounded")
        page.locator("#angular").select_option("rooted")
        page.locator("#magnitude-new-learned").check()
        assert page.locator("#angular-new-learned").is_disabled()
        assert "both learn a parameter 'new'" in page.locator("#angular-parameters").inner_text()
        page.locator("#angular").select_option("sigmoid")
        page.locator("#angular-k-learned").check()
        assert build(line(page)).operator.learned == ("new", "k")
        # α cannot be learned where α is taken out
        page.locator("#magnitude").select_option("stretched")
        page.locator("#magnitude-alpha-learned").check()
        page.locator("#weighting").select_option("separate")
        assert page.locator("#magnitude-alpha-learned").is_disabled()
        assert "cannot learn alpha with it" in page.locator("#note").inner_text()
        assert build(line(page)).operator.learned == ("k",)
        assert len(pictures(page)) == 4


def test_copying(chromium, file):
    with watched(chromium, file, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.locator("#magnitude").select_option("log")
        page.locator("#copy").click()
        page.wait_for_function("() => element('note').textContent === 'Copied.'")
        copied = page.evaluate("() => navigator.clipboard.readText()")
        assert copied == 'dcnet.DecoupledConv2d(64, 128, 3, padding=1, magnitude="log", angular="cosine")'
        # without a clipboard the older way
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')) }")
        page.locator("#angular").select_option("linear")
        page.locator("#copy").click()
        page.wait_for_function("() => element('note').textContent === 'Copied.'")
        assert 'angular="linear"' in page.evaluate("() => navigator.clipboard.readText()")


def test_numbers_that_cannot_be(page):
    go(page, "angular=sigmoid")
    before = pictures(page)
    field = page.locator("#angular-k")
    for text in ("0", "-1", ""):
        field.fill(text)
        assert page.locator("#angular-k-error").inner_text() == "k must be a number > 0"
        assert field.get_attribute("aria-invalid") == "true"
    assert changes(before, pictures(page)) == set()
    field.blur()
    assert field.input_value() == "0.3"
    field.fill("1e-7")  # far below the slider's end, and possible
    assert build(line(page)).angular == "sigmoid:k=1e-07"


def test_extremes(page):
    for extreme in [
        "magnitude=tanh&radius=1e-9&reach=1e3",
        "magnitude=seg&magnitude.beta=-40&radius=1e6&weighting=separate&wNorm=1e-5",
        "magnitude=mix&magnitude.alpha=1e12&weighting=joint&wNorm=1e4&reach=1e-6",
        "angular=sigmoid&angular.k=1e-9",
        "angular=sigmoid&angular.k=1e9&x=0,0",
        "angular=power_cosine&angular.p=1&reach=0.001",
        "angular=power_cosine&angular.p=300",
    ]:
        go(page, extreme)
        settled(page)
        assert page.locator("#note").inner_text() == "", extreme
        assert page.evaluate(
            "() => [...drawn.h, ...drawn.g, drawn.plane].every((row) => [...row].every(Number.isFinite))"
        ), extreme
    before = page.locator("#plane-plot").bounding_box()
    page.set_viewport_size({"width": 500, "height": 700})
    settled(page)
    after = page.locator("#plane-plot").bounding_box()
    assert after["width"] != before["width"]
    assert page.evaluate("() => element('plane-plot').width") == round(after["width"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(chromium, file, scheme):
    with watched(
        chromium,
        file,
        viewport={"width": 360, "height": 740},
        has_touch=True,
        device_scale_factor=2,
        color_scheme=scheme,
    ) as page:
        for address in (
            "",
            "magnitude=seg&angular=sigmoid&angular.k=0.123456789&weighting=separate",
            "magnitude=sphere",
        ):
            go(page, address)
            settled(page)
            assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
        background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(18, 20, 22)") == (scheme == "dark")
        before = pictures(page)
        page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
        after = pictures(page)
        assert all(
            before[plot][0] != after[plot][0] and before[plot][1] == after[plot][1] for plot in PLOTS
        )  # other colors, same numbers
