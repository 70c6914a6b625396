// The page: a change of the setting is settled, shown, drawn once per frame, and written into the address.

const setting = startSetting();
let drawn = null; // the numbers behind the last pictures
let showRows = () => {};
let waiting = false;
let writing = null;

// `formulas`: whether another formula or weighting was chosen, so that there are other sliders.
function changed({ formulas = false, notes = [] }) {
  const reasons = [...notes, ...settle(setting)];
  if (formulas) {
    const focused = document.activeElement?.id;
    showRows = buildRows(setting, changed);
    showChoices(setting);
    if (focused) element(focused)?.focus({ preventScroll: true });
  } else {
    showRows();
  }
  element("note").textContent = reasons.join(" ");
  element("line").textContent = lineOf(setting);
  clearTimeout(writing); // some browsers refuse an address that changes with every move of the mouse
  writing = setTimeout(() => history.replaceState(null, "", `#${toHash(setting)}`), 150);
  draw();
}

function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    drawn = compute(setting);
    drawMagnitude(element("h-plot"), setting, drawn);
    drawAngular(element("g-plot"), setting, drawn);
    drawResponse(element("response-plot"), setting, drawn);
    drawPlane(element("plane-plot"), setting, drawn);
    placeHandles(setting);
    readOut();
  });
}

function readOut() {
  const c = cosine(drawn.w, setting.x);
  const [h, g] = [drawn.operator.h(Math.hypot(...setting.x))[0], drawn.operator.g(c)[0]];
  const angle = Math.acos(c);
  const degrees = `${((angle * 180) / Math.PI).toFixed(1)}°`;
  const norms = `‖x‖ = ${Math.hypot(...setting.x).toFixed(3)}, θ = ${angle.toFixed(3)} (${degrees})`;
  element("readout").textContent = `At x: ${norms}; h = ${nameNumber(h)}, g = ${nameNumber(g)}, f = h·g = ${nameNumber(h * g)}`;
}

function open(hash) {
  const { setting: found, problems } = fromHash(hash.replace(/^#/, ""));
  Object.assign(setting, found);
  changed({ formulas: true, notes: problems.length ? [`In the address: ${problems.join("; ")}.`] : [] });
}

async function copy() {
  const text = element("line").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // no clipboard for this page: what is selected can still be copied
    getSelection().selectAllChildren(element("line"));
    if (!document.execCommand("copy")) {
      element("note").textContent = "The browser does not allow copying; the line is selected.";
      return;
    }
  }
  element("note").textContent = "Copied.";
}

fillSelects(setting, changed);
listenToPlane(setting, changed);
element("copy").addEventListener("click", copy);
element("reset").addEventListener("click", () => open(""));
addEventListener("hashchange", () => open(location.hash));
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(draw).observe(element("plane-plot"));
open(location.hash);
