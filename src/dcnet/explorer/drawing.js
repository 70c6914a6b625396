// Drawing on a canvas: axes with ticks and labels, curves, heat maps and their colors. Knows nothing of formulas.

const FONT = "12px system-ui, sans-serif";
const PI_TICKS = [[0, "0"], [Math.PI / 4, "π/4"], [Math.PI / 2, "π/2"], [(3 * Math.PI) / 4, "3π/4"], [Math.PI, "π"]];

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// The canvas made as sharp as the screen, and empty: {context, width, height} in CSS pixels.
function clear(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = FONT;
  return { context, width, height };
}

// The next round number from |value| up. In coarse steps: an axis that followed exactly would hide that a curve grows.
function roundUp(value) {
  if (!(value > 1e-12) || !Number.isFinite(value)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 5, 7.5, 10].find((step) => step * power >= value * (1 - 1e-9));
}

// A range around 0 and all finite values, in round numbers.
function rangeOf(curves) {
  let [low, high] = [0, 0];
  for (const values of curves) {
    for (const value of values) {
      if (!Number.isFinite(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  high = high > 1e-9 ? roundUp(high * 1.04) : 0;
  low = low < -1e-9 ? -roundUp(-low * 1.04) : 0;
  if (low === 0 && high === 0) high = 1;
  return [low < 0 ? low : low - 0.03 * (high - low), high > 0 ? high : high + 0.03 * (high - low)];
}

function ticksOf([low, high], room) {
  const rough = (high - low) / Math.max(3, room);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((s) => s * power >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push([i * step, nameNumber(i * step)]);
  return ticks;
}

function nameNumber(value) {
  const size = Math.abs(value);
  const short = Number(value.toPrecision(4));
  return (size >= 1e5 || (size > 0 && size < 1e-3) ? short.toExponential().replace("e+", "e") : String(short)).replaceAll("-", "−");
}

// Axes in a box {left, top, width, height}; returns {x, y}: from values to pixels.
function drawAxes(context, box, { x, y, xTicks, yTicks, xLabel, yLabel }) {
  const toX = (v) => box.left + ((v - x[0]) / (x[1] - x[0])) * box.width;
  const toY = (v) => box.top + box.height - ((v - y[0]) / (y[1] - y[0])) * box.height;
  context.save();
  context.lineWidth = 1;
  context.strokeStyle = color("grid");
  context.fillStyle = color("faint");
  for (const [value, name] of xTicks ?? ticksOf(x, box.width / 70)) {
    line(context, [[toX(value), box.top], [toX(value), box.top + box.height]]);
    context.textAlign = "center";
    context.textBaseline = "top";
    if (xLabel) context.fillText(name, toX(value), box.top + box.height + 5);
  }
  for (const [value, name] of yTicks ?? ticksOf(y, box.height / 40)) {
    line(context, [[box.left, toY(value)], [box.left + box.width, toY(value)]]);
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(name, box.left - 5, toY(value));
  }
  context.strokeStyle = color("faint");
  if (y[0] < 0 && y[1] > 0) line(context, [[box.left, toY(0)], [box.left + box.width, toY(0)]]);
  context.strokeRect(box.left, box.top, box.width, box.height);
  context.fillStyle = color("ink");
  context.textAlign = "center";
  context.textBaseline = "bottom";
  if (xLabel) context.fillText(xLabel, box.left + box.width / 2, box.top + box.height + 36);
  context.translate(box.left - 42, box.top + box.height / 2);
  context.rotate(-Math.PI / 2);
  context.textBaseline = "middle";
  context.fillText(yLabel, 0, 0);
  context.restore();
  return { x: toX, y: toY };
}

function line(context, points) {
  context.beginPath();
  let pen = false; // lifted over what is not a number
  for (const [x, y] of points) {
    const good = Number.isFinite(x) && Number.isFinite(y);
    if (good && pen) context.lineTo(x, y);
    else if (good) context.moveTo(x, y);
    pen = good;
  }
  context.stroke();
}

// Runs `draw` with everything outside the box cut off.
function inside(context, box, draw) {
  context.save();
  context.beginPath();
  context.rect(box.left, box.top, box.width, box.height);
  context.clip();
  draw();
  context.restore();
}

// Names of curves in a row at the top of a canvas, each with its line: [{name, color, dash}].
function drawLegend(context, left, top, width, curves) {
  context.save();
  context.textAlign = "left";
  context.textBaseline = "middle";
  let [x, y] = [left, top];
  for (const curve of curves) {
    const needed = 34 + context.measureText(curve.name).width;
    if (x > left && x + needed > left + width) [x, y] = [left, y + 16];
    stroke(context, curve);
    line(context, [[x, y], [x + 24, y]]);
    context.fillStyle = color("ink");
    context.fillText(curve.name, x + 28, y);
    x += needed + 8;
  }
  context.restore();
}

function stroke(context, { color: name, dash = [], width = 2 }) {
  context.strokeStyle = color(name);
  context.lineWidth = width;
  context.setLineDash(dash);
}

// -- colors of a response -------------------------------------------------------------------------------------------

// sRGB to and from Oklab, in which equal steps look equal (Björn Ottosson, 2020).
function toOklab(hex) {
  const [r, g, b] = [1, 3, 5].map((i) => {
    const v = parseInt(hex.slice(i, i + 2), 16) / 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  });
  const [l, s, t] = [
    0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
    0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
    0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
  ].map(Math.cbrt);
  return [
    0.2104542553 * l + 0.793617785 * s - 0.0040720468 * t,
    1.9779984951 * l - 2.428592205 * s + 0.4505937099 * t,
    0.0259040371 * l + 0.7827717662 * s - 0.808675766 * t,
  ];
}

function fromOklab([L, a, b]) {
  const [l, s, t] = [
    L + 0.3963377774 * a + 0.2158037573 * b,
    L - 0.1055613458 * a - 0.0638541728 * b,
    L - 0.0894841775 * a - 1.291485548 * b,
  ].map((v) => v ** 3);
  return [
    4.0767416621 * l - 3.3077115913 * s + 0.2309699292 * t,
    -1.2684380046 * l + 2.6097574011 * s - 0.3413193965 * t,
    -0.0041960863 * l - 0.7034186147 * s + 1.707614701 * t,
  ].map((v) => 255 * (v <= 0.0031308 ? 12.92 * v : 1.055 * v ** (1 / 2.4) - 0.055));
}

// 511 colors from the lowest over the neutral zero to the highest, as bytes r, g, b.
function divergingColors() {
  const [low, zero, high] = ["low", "zero", "high"].map((name) => toOklab(color(name)));
  const table = new Uint8ClampedArray(511 * 3);
  for (let i = 0; i < 511; i++) {
    const share = Math.abs(i - 255) / 255;
    const end = i < 255 ? low : high;
    table.set(fromOklab(zero.map((v, j) => v + share * (end[j] - v))), 3 * i);
  }
  return table;
}

// An image of values(column, row) over a box, rows from the top; what is not a number stays empty.
function drawHeat(context, box, columns, rows, values, limit) {
  const colors = divergingColors();
  const image = new ImageData(columns, rows);
  for (let row = 0, i = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++, i += 4) {
      const value = values(column, row);
      if (Number.isNaN(value)) continue;
      const index = 3 * Math.round(255 + 255 * Math.max(-1, Math.min(1, value / limit)));
      for (let j = 0; j < 3; j++) image.data[i + j] = colors[index + j];
      image.data[i + 3] = 255;
    }
  }
  const small = document.createElement("canvas");
  [small.width, small.height] = [columns, rows];
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = true;
  context.drawImage(small, box.left, box.top, box.width, box.height);
}

// Lines of equal values(column, row) over a box, dashed where negative, so that gray print keeps the sign. Marching squares between centers.
function drawContours(context, box, columns, rows, values, limit) {
  const levels = [-0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75].map((share) => ({ level: share * limit, path: new Path2D() }));
  const grid = Float64Array.from({ length: columns * rows }, (_, i) => values(i % columns, Math.floor(i / columns)));
  const [stepX, stepY] = [box.width / columns, box.height / rows];
  for (let row = 0; row + 1 < rows; row++) {
    for (let column = 0; column + 1 < columns; column++) {
      const i = row * columns + column;
      const [a, b, c, d] = [grid[i], grid[i + 1], grid[i + columns + 1], grid[i + columns]]; // around the square
      const [least, most] = [Math.min(a, b, c, d), Math.max(a, b, c, d)]; // not a number where one of them is none: nothing is drawn
      for (const { level, path } of levels) {
        if (!(least < level && level <= most)) continue;
        if (level < 0 && (2 * column + 3 * row) % 10 < 5) continue; // pieces are too short for a line's own dashes; these gaps show in any direction
        const crossed = [];
        for (const [x0, y0, from, x1, y1, to] of [[0, 0, a, 1, 0, b], [1, 0, b, 1, 1, c], [1, 1, c, 0, 1, d], [0, 1, d, 0, 0, a]]) {
          if (from < level === to < level) continue;
          const part = (level - from) / (to - from);
          crossed.push([box.left + (column + 0.5 + x0 + part * (x1 - x0)) * stepX, box.top + (row + 0.5 + y0 + part * (y1 - y0)) * stepY]);
        }
        for (let k = 0; k + 1 < crossed.length; k += 2) {
          path.moveTo(...crossed[k]);
          path.lineTo(...crossed[k + 1]);
        }
      }
    }
  }
  context.save();
  context.globalAlpha = 0.6;
  for (const { level, path } of levels) {
    stroke(context, { color: "ink", width: level === 0 ? 1.2 : 0.7 });
    context.stroke(path);
  }
  context.restore();
}

// The scale of colors beside a box.
function drawColorBar(context, box, limit, label) {
  const bar = { left: box.left + box.width + 12, top: box.top, width: 12, height: box.height };
  drawHeat(context, bar, 1, 255, (_, row) => limit * (1 - (2 * row) / 254), limit);
  context.save();
  context.strokeStyle = color("faint");
  context.strokeRect(bar.left, bar.top, bar.width, bar.height);
  context.fillStyle = color("faint");
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (const share of [-1, -0.5, 0, 0.5, 1]) {
    context.fillText(nameNumber(share * limit), bar.left + bar.width + 4, bar.top + ((1 - share) / 2) * bar.height);
  }
  context.fillStyle = color("ink");
  context.textAlign = "right";
  context.textBaseline = "bottom";
  context.fillText(label, bar.left + bar.width + 40, bar.top - 9);
  context.restore();
}
