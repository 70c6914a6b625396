// How a magnitude, an angular function and ‖w‖ become one response: the rule of ops/operator.py, no formula of its own.

// The results of a formula: [value, slope in its first argument, slope in ρ if it has one, slope in each learnable parameter].
function evaluate(formula, first, rho, values) {
  const parameters = formula.parameters.map((parameter) => values[parameter.name]);
  return formula.has_radius ? formula.results(first, rho, ...parameters) : formula.results(first, ...parameters);
}

// What the results of a formula after its first slope are slopes in.
function furtherSlopes(formula) {
  const learnable = formula.parameters.filter((parameter) => parameter.start !== null).map((parameter) => parameter.name);
  return formula.has_radius ? ["rho", ...learnable] : learnable;
}

// {h: n -> value and slopes of h(‖w‖, n), g: c -> value and slopes of g}.
// `chosen`: magnitude and angular {formula, values}, weighting (null, or a name), rho, and ‖w‖ as wNorm.
function makeOperator({ magnitude, angular, weighting, rho, wNorm }) {
  const h = (norm, values) => evaluate(magnitude.formula, norm, rho, values);
  const further = furtherSlopes(magnitude.formula);
  const alpha = magnitude.values.alpha ?? 1;
  const one = "alpha" in magnitude.values ? { ...magnitude.values, alpha: 1 } : magnitude.values;
  const weighted = {
    null: (n) => h(n, magnitude.values),
    linear: (n) => h(n, magnitude.values).map((result) => wNorm * result),
    joint(n) {
      const [value, slope, ...others] = h(n * wNorm, magnitude.values);
      return [value, wNorm * slope, ...others];
    },
    separate(n) {
      const [kernel, , ...kernelSlopes] = h(wNorm, one);
      const [patch, slope, ...patchSlopes] = h(n, one);
      // ρ and the learned parameters are in both factors, α in neither
      const others = further.map((name, i) => (name === "alpha" ? kernel * patch : alpha * (kernelSlopes[i] * patch + kernel * patchSlopes[i])));
      return [alpha * kernel * patch, alpha * kernel * slope, ...others];
    },
  };
  return { h: weighted[weighting], g: (c) => evaluate(angular.formula, c, null, angular.values) };
}

// cos θ of two vectors of the plane; 0 where there is no angle, as in the layer.
function cosine(a, b) {
  const norms = Math.hypot(...a) * Math.hypot(...b);
  return norms > 0 ? Math.max(-1, Math.min(1, (a[0] * b[0] + a[1] * b[1]) / norms)) : 0;
}

// h·g for an input x of the plane and a kernel in the direction w.
function respond(operator, w, x) {
  return operator.h(Math.hypot(...x))[0] * operator.g(cosine(w, x))[0];
}
