// What is chosen on the page: its operator, its line of Python, what the package refuses, its place in the address.

const KINDS = ["magnitude", "angular"];
const RADIUS = "radius"; // the key of the radius among the learned

function startSetting() {
  const values = {};
  for (const kind of KINDS) {
    values[kind] = {};
    for (const [name, formula] of Object.entries(FORMULAS[kind])) {
      values[kind][name] = Object.fromEntries(formula.parameters.map((parameter) => [parameter.name, parameter.default]));
    }
  }
  const others = Object.fromEntries(Object.entries(OTHERS).map(([key, parameter]) => [key, parameter.default]));
  const { magnitude, angular, weighting } = DEFAULTS;
  return { magnitude, angular, weighting, values, ...others, learned: new Set([RADIUS]), wAngle: 0.5, x: [1.2, 1.7] };
}

const formulaOf = (setting, kind) => FORMULAS[kind][setting[kind]];
const valuesOf = (setting, kind) => setting.values[kind][setting[kind]];
const learnedKey = (setting, kind, name) => `${kind} ${setting[kind]}:${name}`;
const learns = (setting, kind, name) => setting.learned.has(learnedKey(setting, kind, name));
// A parameter is learned or a number; a learned one is drawn at its start.
function learn(setting, key, into, name, start) {
  setting.learned.add(key);
  into[name] = start;
}
const admits = (parameter, value) =>
  Number.isFinite(value) && (parameter.low === null || (parameter.open ? value > parameter.low : value >= parameter.low));

function operatorOf(setting) {
  const [magnitude, angular] = KINDS.map((kind) => ({ formula: formulaOf(setting, kind), values: valuesOf(setting, kind) }));
  return makeOperator({ magnitude, angular, weighting: setting.weighting, rho: setting.radius, wNorm: setting.wNorm });
}

// The kernel as it is drawn: an unweighted operator knows its direction only.
function kernelOf(setting) {
  const length = setting.weighting === null ? 1 : setting.wNorm;
  return [length * Math.cos(setting.wAngle), length * Math.sin(setting.wAngle)];
}

// ‖x‖ at which the magnitude passes its radius; null where it has none.
function bendOf(setting) {
  if (!formulaOf(setting, "magnitude").has_radius) return null;
  return setting.weighting === "joint" ? setting.radius / setting.wNorm : setting.radius;
}

const bendName = (setting) => (setting.weighting === "joint" ? "ρ/‖w‖" : "ρ");

// "seg:beta=0.2", as the package reads it.
function specOf(setting, kind) {
  const values = valuesOf(setting, kind);
  const given = [];
  for (const { name, default: usual } of formulaOf(setting, kind).parameters) {
    if (learns(setting, kind, name)) given.push(`${name}=${LEARNED}`);
    else if (values[name] !== usual) given.push(`${name}=${values[name]}`);
  }
  return setting[kind] + (given.length ? `:${given.join(",")}` : "");
}

function lineOf(setting) {
  const parts = ["64, 128, 3, padding=1", ...KINDS.map((kind) => `${kind}="${specOf(setting, kind)}"`)];
  if (setting.weighting !== null) parts.push(`weighting="${setting.weighting}"`);
  if (formulaOf(setting, "magnitude").has_radius && !setting.learned.has(RADIUS)) parts.push(`radius=${setting.radius}`);
  return `dcnet.DecoupledConv2d(${parts.join(", ")})`;
}

// Why a parameter of the chosen formulas cannot be learned, in the package's words; undefined where it can.
function whyNotLearned(setting, kind, name) {
  if (kind === "magnitude") return REFUSALS[`${setting.magnitude}:${name} ${setting.weighting}`];
  return learns(setting, "magnitude", name) ? REFUSALS[`${setting.magnitude} ${setting.angular}:${name}`] : undefined;
}

// Takes back what the package would refuse; returns its reasons.
function settle(setting) {
  const reasons = [];
  const refused = REFUSALS[`${setting.magnitude} ${setting.weighting}`];
  if (refused) {
    reasons.push(refused);
    setting.weighting = null;
  }
  for (const kind of KINDS) {
    for (const { name } of formulaOf(setting, kind).parameters) {
      const reason = learns(setting, kind, name) && whyNotLearned(setting, kind, name);
      if (!reason) continue;
      reasons.push(reason);
      setting.learned.delete(learnedKey(setting, kind, name));
    }
  }
  setting.x = setting.x.map((v) => Math.max(-setting.reach, Math.min(setting.reach, v)));
  return reasons;
}

// The setting as the part of an address after #, without what is as at the start.
function toHash(setting) {
  const usual = startSetting();
  const found = new URLSearchParams();
  for (const key of [...KINDS, "weighting", "wNorm", "reach", "wAngle", "x"]) {
    if (String(setting[key]) !== String(usual[key])) found.set(key, String(setting[key]));
  }
  if (!setting.learned.has(RADIUS)) found.set(RADIUS, String(setting.radius));
  for (const kind of KINDS) {
    const values = valuesOf(setting, kind);
    for (const { name, default: start } of formulaOf(setting, kind).parameters) {
      if (learns(setting, kind, name)) found.set(`${kind}.${name}`, LEARNED);
      else if (values[name] !== start) found.set(`${kind}.${name}`, String(values[name]));
    }
  }
  return found.toString().replaceAll("%2C", ",");
}

// {setting, problems}: what an address says, and in words what it says in vain.
function fromHash(text) {
  const setting = startSetting();
  const problems = [];
  const given = new URLSearchParams(text);
  const take = (key, possible, read) => {
    if (!given.has(key)) return;
    const value = given.get(key);
    given.delete(key);
    if (!read(value)) problems.push(`${key}=${value} is not ${possible}`);
  };
  const one = (names) => `one of ${names.join(", ")}`;
  for (const kind of KINDS) {
    const names = Object.keys(FORMULAS[kind]);
    take(kind, one(names), (value) => names.includes(value) && (setting[kind] = value));
  }
  take("weighting", one(WEIGHTINGS.map(String)), (value) => {
    const found = WEIGHTINGS.find((weighting) => String(weighting) === value);
    if (found !== undefined) setting.weighting = found;
    return found !== undefined;
  });
  const takeNumber = (key, parameter, into, name, learned) =>
    take(key, parameter.words + (parameter.start === null ? "" : `, or ${LEARNED}`), (value) => {
      const learning = value === LEARNED && parameter.start !== null;
      const good = learning || (value.trim() !== "" && admits(parameter, Number(value)));
      if (good) setting.learned.delete(learned);
      if (learning) learn(setting, learned, into, name, parameter.start);
      else if (good) into[name] = Number(value);
      return good;
    });
  for (const [key, parameter] of Object.entries(OTHERS)) takeNumber(key, parameter, setting, key, key);
  takeNumber("wAngle", { low: null, start: null, words: "an angle" }, setting, "wAngle");
  take("x", "two numbers", (value) => {
    const numbers = value.split(",").map(Number);
    const good = numbers.length === 2 && numbers.every(Number.isFinite);
    if (good) setting.x = numbers;
    return good;
  });
  for (const kind of KINDS) {
    for (const parameter of formulaOf(setting, kind).parameters) {
      const { name } = parameter;
      takeNumber(`${kind}.${name}`, parameter, valuesOf(setting, kind), name, learnedKey(setting, kind, name));
    }
  }
  for (const key of given.keys()) problems.push(`${key} is not known here`);
  return { setting, problems };
}
