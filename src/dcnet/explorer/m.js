// The arithmetic a formula may use, on numbers: the twin of formulas/m.py, name by name.
const m = {
  abs: Math.abs,
  sign: Math.sign,
  step: (x) => Number(x > 0),
  minimum: Math.min,
  maximum: Math.max,
  where: (condition, a, b) => (condition ? a : b),
  exp: Math.exp,
  log: Math.log,
  log1p: Math.log1p,
  sqrt: Math.sqrt,
  rsqrt: (x) => 1 / Math.sqrt(x),
  tanh: Math.tanh,
  asin: Math.asin,
  asin_slope: (c) => m.rsqrt(Math.max((1 - c) * (1 + c), ASIN_SLOPE_FLOOR)),
  power: Math.pow,
};
