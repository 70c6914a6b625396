// Selects, sliders and number fields: each shows the setting, and changes it.

const element = (id) => document.getElementById(id);

function make(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const WEIGHTING_TEXTS = {
  null: "h(‖x‖)",
  linear: "‖w‖·h(‖x‖)",
  joint: "h(‖x‖·‖w‖)",
  separate: "α·h₁(‖w‖)·h₁(‖x‖), h₁ being h with α = 1",
};

function fillSelects(setting, changed) {
  for (const kind of KINDS) {
    element(kind).append(...Object.keys(FORMULAS[kind]).map((name) => make("option", { value: name, textContent: name })));
    element(kind).addEventListener("change", () => {
      setting[kind] = element(kind).value;
      changed({ formulas: true });
    });
  }
  element("weighting").append(...WEIGHTINGS.map((name) => make("option", { value: String(name), textContent: name ?? "None" })));
  element("weighting").addEventListener("change", () => {
    setting.weighting = WEIGHTINGS.find((name) => String(name) === element("weighting").value);
    changed({ formulas: true });
  });
}

// A symbol, a slider and a number field for one parameter. Numbers beyond the slider's ends are possible in the field.
function makeRow(id, parameter, read, write) {
  const [low, high] = parameter.slider;
  const slider = make("input", { type: "range", id: `${id}-slider`, min: low, max: high, step: 0.01 });
  const field = make("input", { type: "number", id, step: "any" });
  const error = make("span", { className: "error", id: `${id}-error` });
  error.setAttribute("role", "alert");
  slider.setAttribute("aria-label", `${parameter.symbol}, slider`);
  field.setAttribute("aria-describedby", error.id);
  const row = make("div", { className: "row" }, make("label", { htmlFor: id, textContent: parameter.symbol }), slider, field, error);
  const complain = (wrong) => {
    error.textContent = wrong ? `${parameter.symbol} must be ${parameter.words}` : "";
    field.setAttribute("aria-invalid", String(wrong));
  };
  const show = (value) => {
    slider.value = value;
    if (document.activeElement !== field || Number(field.value) !== value) field.value = value;
    complain(false);
  };
  slider.addEventListener("input", () => {
    const value = Number(Number(slider.value).toFixed(4));
    show(value);
    write(value);
  });
  field.addEventListener("input", () => {
    const value = field.value === "" ? NaN : Number(field.value);
    complain(!admits(parameter, value));
    if (!admits(parameter, value)) return; // the curves keep the last value that was possible
    slider.value = value;
    write(value);
  });
  field.addEventListener("blur", () => show(read())); // so that the field does not go on showing what is not drawn
  return { row, show: () => show(read()) };
}

// The choice of learning a parameter, under its slider. `why` says why it cannot be learned, if it cannot.
function makeLearned(id, words, isLearned, why, choose) {
  const box = make("input", { type: "checkbox", id: `${id}-learned` });
  const text = make("span", {});
  box.addEventListener("change", () => choose(box.checked));
  const show = () => {
    const reason = why();
    box.checked = isLearned();
    box.disabled = Boolean(reason);
    text.textContent = ` ${words}${reason ? ` (not here: ${reason})` : ""}`;
  };
  return { label: make("label", { className: "learned" }, box, text), show };
}

// Rows for all that the chosen formulas have; returns what makes every row show the setting.
function buildRows(setting, changed) {
  const shows = [];
  const add = (holder, id, parameter, into, name, key = null, words = "", why = () => null) => {
    const { row, show } = makeRow(id, parameter, () => into[name], (value) => {
      into[name] = value;
      setting.learned.delete(key); // a number was chosen
      changed({});
    });
    shows.push(show);
    if (parameter.start !== null) {
      const learned = makeLearned(id, words, () => setting.learned.has(key), why, (wanted) => {
        if (wanted) learn(setting, key, into, name, parameter.start);
        else setting.learned.delete(key);
        changed({});
      });
      row.append(learned.label);
      shows.push(learned.show);
    }
    element(holder).append(row);
  };
  for (const holder of ["magnitude", "angular", "weighting", "view"]) element(`${holder}-parameters`).replaceChildren();
  for (const kind of KINDS) {
    for (const parameter of formulaOf(setting, kind).parameters) {
      const { name, start } = parameter;
      const why = () => whyNotLearned(setting, kind, name);
      add(`${kind}-parameters`, `${kind}-${name}`, parameter, valuesOf(setting, kind), name, learnedKey(setting, kind, name), `learned, from ${start}`, why);
    }
  }
  if (REFUSALS[`${setting.magnitude} radius`]) {
    element("magnitude-parameters").append(make("p", { className: "reason", textContent: "This magnitude has no radius ρ." }));
  } else {
    add("magnitude-parameters", RADIUS, OTHERS[RADIUS], setting, RADIUS, RADIUS, "learned, times E{‖x‖}");
  }
  if (setting.weighting !== null) add("weighting-parameters", "wNorm", OTHERS.wNorm, setting, "wNorm");
  add("view-parameters", "reach", OTHERS.reach, setting, "reach");
  const showAll = () => shows.forEach((show) => show());
  showAll();
  return showAll;
}

// Selects, texts and reasons as the setting has them.
function showChoices(setting) {
  for (const kind of KINDS) {
    element(kind).value = setting[kind];
    const formula = formulaOf(setting, kind);
    const growth = formula.bounded ? "bounded" : "unbounded";
    element(`${kind}-text`).textContent = kind === "magnitude" ? `h = ${formula.text}; ${growth}` : `g = ${formula.text}`;
  }
  element("weighting").value = String(setting.weighting);
  element("weighting-text").textContent = `h(‖w‖, ‖x‖) = ${WEIGHTING_TEXTS[setting.weighting]}`;
  const reasons = new Set();
  for (const option of element("weighting").options) {
    const reason = REFUSALS[`${setting.magnitude} ${option.value}`];
    option.disabled = Boolean(reason);
    if (reason) reasons.add(reason);
  }
  element("weighting-reason").textContent = [...reasons].join(" ");
  element("radius-legend").hidden = bendOf(setting) === null;
  element("radius-name").textContent = `‖x‖ = ${bendName(setting)}`;
}
