// The four pictures of a setting: h over ‖x‖, g over θ, the response over both, the response over the input plane.

const SAMPLES = 400;
const CELLS = 120; // of a heat map, each way
const SLOPES = [{ color: "slope", dash: [7, 4] }, { color: "further", dash: [2, 3] }, { color: "projected", dash: [9, 3, 2, 3] }];

// The numbers behind the pictures. Angles and cells are sampled at centers: no slope is capped there, no vector without direction.
function compute(setting) {
  const operator = operatorOf(setting);
  const centers = (count, high) => Array.from({ length: count }, (_, i) => ((i + 0.5) / count) * high);
  const n = Array.from({ length: SAMPLES }, (_, i) => (i / (SAMPLES - 1)) * setting.reach);
  const theta = centers(SAMPLES, Math.PI);
  const h = transpose(n.map((v) => operator.h(v)));
  const g = transpose(theta.map((t) => inTheta(operator.g(Math.cos(t)), t)));
  // f is a product, so that its picture over ‖x‖ and θ needs no more than a row and a column
  const across = centers(CELLS, setting.reach).map((v) => operator.h(v)[0]);
  const down = centers(CELLS, Math.PI).map((t) => operator.g(Math.cos(t))[0]).reverse();
  const w = kernelOf(setting);
  const plane = new Float64Array(CELLS * CELLS);
  const place = (i) => ((2 * (i + 0.5)) / CELLS - 1) * setting.reach;
  for (let row = 0, i = 0; row < CELLS; row++) {
    for (let column = 0; column < CELLS; column++, i++) plane[i] = respond(operator, w, [place(column), -place(row)]);
  }
  const largest = plane.reduce((most, value) => (Math.abs(value) > most ? Math.abs(value) : most), 0);
  return { operator, n, theta, h, g, across, down, plane, w, limit: roundUp(largest) };
}

const transpose = (rows) => rows[0].map((_, i) => rows.map((row) => row[i]));
// dg/dθ = −sin θ · dg/d cos θ
const inTheta = ([value, slope, ...others], theta) => [value, -Math.sin(theta) * slope, ...others];

const symbolOf = (formula, name) =>
  name === "rho" ? OTHERS[RADIUS].symbol : formula.parameters.find((parameter) => parameter.name === name).symbol;

// Value above, slopes below, over the same axis.
function drawCurves(canvas, { x, range, xLabel, xTicks, letter, argument, results, formula, marks }) {
  const { context, width, height } = clear(canvas);
  const further = furtherSlopes(formula).map((name) => `∂${letter}/∂${symbolOf(formula, name)}`);
  const names = [letter, `∂${letter}/∂${argument}`, ...further];
  const curves = results.map((values, i) => ({ name: names[i], values, ...(i ? SLOPES[(i - 1) % SLOPES.length] : { color: "value" }) }));
  const [left, right] = [58, 18];
  drawLegend(context, left, 10, width - left - right, curves);
  const room = height - 28 - 44 - 16;
  const above = { left, top: 28, width: width - left - right, height: 0.56 * room };
  const below = { ...above, top: above.top + above.height + 16, height: 0.44 * room };
  const panels = [[above, curves.slice(0, 1), letter], [below, curves.slice(1), "slope"]];
  for (const [box, shown, yLabel] of panels) {
    const y = rangeOf(shown.map((curve) => curve.values));
    const to = drawAxes(context, box, { x: range, y, xTicks, xLabel: box === below ? xLabel : "", yLabel });
    inside(context, box, () => {
      for (const mark of marks) drawMark(context, box, to, mark);
      for (const curve of shown) {
        stroke(context, curve);
        line(context, x.map((v, i) => [to.x(v), to.y(curve.values[i])]));
      }
      const probe = marks.find((mark) => mark.results);
      shown.forEach((curve, i) => drawDot(context, to.x(probe.at), to.y(probe.results[box === above ? i : i + 1]), curve.color));
    });
  }
  const summary = curves.map((curve) => `${curve.name} from ${nameNumber(Math.min(...curve.values))} to ${nameNumber(Math.max(...curve.values))}`);
  canvas.setAttribute("aria-label", `Curves over ${xLabel}: ${summary.join("; ")}`);
}

function drawMark(context, box, to, { at, name, dash = [], color: of }) {
  stroke(context, { color: of, dash, width: 1 });
  line(context, [[to.x(at), box.top], [to.x(at), box.top + box.height]]);
  context.fillStyle = color(of);
  context.textBaseline = "top";
  const nearRight = to.x(at) > box.left + box.width - 40;
  context.textAlign = nearRight ? "right" : "left";
  context.fillText(name, to.x(at) + (nearRight ? -4 : 4), box.top + 4);
}

function drawDot(context, x, y, of) {
  context.setLineDash([]);
  context.beginPath();
  context.arc(x, y, 4.5, 0, 2 * Math.PI);
  context.fillStyle = color(of);
  context.fill();
  context.lineWidth = 1.5;
  context.strokeStyle = color("card");
  context.stroke();
}

function drawMagnitude(canvas, setting, { operator, n, h }) {
  const at = Math.hypot(...setting.x);
  const marks = [{ at, name: "x", color: "input", results: operator.h(at) }];
  const bend = bendOf(setting);
  if (bend !== null) marks.push({ at: bend, name: bendName(setting), dash: [3, 3], color: "faint" });
  const formula = formulaOf(setting, "magnitude");
  drawCurves(canvas, { x: n, range: [0, setting.reach], xLabel: "‖x‖", letter: "h", argument: "‖x‖", results: h, formula, marks });
}

function drawAngular(canvas, setting, { operator, theta, g, w }) {
  const at = Math.acos(cosine(w, setting.x));
  const marks = [{ at, name: "x", color: "input", results: inTheta(operator.g(Math.cos(at)), at) }];
  const formula = formulaOf(setting, "angular");
  const axis = { x: theta, range: [0, Math.PI], xTicks: PI_TICKS, xLabel: "θ, the angle between w and x (radians)" };
  drawCurves(canvas, { ...axis, letter: "g", argument: "θ", results: g, formula, marks });
}

function drawResponse(canvas, setting, { across, down, limit, w }) {
  const { context, width, height } = clear(canvas);
  const box = { left: 58, top: 26, width: width - 58 - 76, height: height - 26 - 44 };
  const axes = { x: [0, setting.reach], y: [0, Math.PI], yTicks: PI_TICKS, xLabel: "‖x‖", yLabel: "θ (radians)" };
  const to = drawAxes(context, box, axes);
  const values = (column, row) => across[column] * down[row];
  drawHeat(context, box, CELLS, CELLS, values, limit);
  drawContours(context, box, CELLS, CELLS, values, limit);
  drawColorBar(context, box, limit, "f = h·g");
  inside(context, box, () => drawDot(context, to.x(Math.hypot(...setting.x)), to.y(Math.acos(cosine(w, setting.x))), "input"));
  canvas.setAttribute("aria-label", `Response over ‖x‖ from 0 to ${setting.reach} and θ from 0 to π; colors from −${limit} to ${limit}`);
}

// -- the input plane ---------------------------------------------------------------------------------------------------

// Where the plane lies in its canvas: as many pixels to a unit across as up.
function planeBox(canvas) {
  const [left, top] = [58, 26];
  const side = Math.max(1, Math.min(canvas.clientWidth - left - 76, canvas.clientHeight - top - 44));
  return { left: left + (canvas.clientWidth - left - 76 - side) / 2, top, width: side, height: side };
}

// Vectors over the plane on three circles, turned against each other.
function fieldOf(reach) {
  return [0.3, 0.62, 0.94].flatMap((share, ring) =>
    Array.from({ length: 8 }, (_, i) => {
      const angle = ((i + ring / 3) / 8) * 2 * Math.PI;
      return [share * reach * Math.cos(angle), share * reach * Math.sin(angle)];
    }),
  );
}

// The vector of the direction of x whose length is h.
function project(operator, x) {
  const n = Math.hypot(...x);
  const h = operator.h(n)[0];
  return n > 0 ? x.map((v) => (v / n) * h) : x;
}

function drawPlane(canvas, setting, { operator, plane, limit, w }) {
  const { context } = clear(canvas);
  const box = planeBox(canvas);
  const range = [-setting.reach, setting.reach];
  const to = drawAxes(context, box, { x: range, y: range, xLabel: "x₁", yLabel: "x₂" });
  const values = (column, row) => plane[row * CELLS + column];
  drawHeat(context, box, CELLS, CELLS, values, limit);
  drawContours(context, box, CELLS, CELLS, values, limit);
  drawColorBar(context, box, limit, "f = h·g");
  const at = ([x, y]) => [to.x(x), to.y(y)];
  const haloed = (style, points) => {
    stroke(context, { color: "card", width: style.width + 1.6 });
    line(context, points);
    stroke(context, style);
    line(context, points);
  };
  inside(context, box, () => {
    const bend = bendOf(setting);
    if (bend !== null) {
      stroke(context, { color: "ink", dash: [5, 4], width: 1.2 });
      context.beginPath();
      context.arc(...at([0, 0]), to.x(bend) - to.x(0), 0, 2 * Math.PI);
      context.stroke();
    }
    for (const x of fieldOf(setting.reach)) {
      const end = project(operator, x);
      haloed({ color: "projected", width: 1.5 }, [at(x), at(end)]);
      drawInput(context, ...at(x));
      drawProjected(context, ...at(end), 4);
    }
    haloed({ color: "input", width: 2.5 }, [at([0, 0]), at(setting.x)]);
    const projected = project(operator, setting.x);
    haloed({ color: "projected", width: 2.5, dash: [5, 3] }, [at([0, 0]), at(projected)]);
    drawProjected(context, ...at(projected), 6);
    haloed({ color: "ink", width: 3 }, [at([0, 0]), at(w)]);
  });
  canvas.setAttribute("aria-label", `Response over inputs from −${setting.reach} to ${setting.reach}; colors from −${limit} to ${limit}`);
}

function drawInput(context, x, y) {
  context.setLineDash([]);
  context.beginPath();
  context.arc(x, y, 3.5, 0, 2 * Math.PI);
  context.fillStyle = color("card");
  context.fill();
  stroke(context, { color: "input", width: 1.8 });
  context.stroke();
}

function drawProjected(context, x, y, size) {
  context.beginPath();
  for (const [dx, dy] of [[0, -size], [size, 0], [0, size], [-size, 0]]) context.lineTo(x + dx, y + dy);
  context.closePath();
  context.fillStyle = color("projected");
  context.fill();
  stroke(context, { color: "card", width: 1 });
  context.stroke();
}
