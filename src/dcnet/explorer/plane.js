// The handles of w and x over the input plane: by mouse, finger and keyboard.

const LEAST_LENGTH = 0.05; // of w while it is dragged: a kernel without length has no direction

function placeHandles(setting) {
  const box = planeBox(element("plane-plot"));
  const put = (id, [x, y], words) => {
    const within = (v) => Math.max(-1, Math.min(1, v / setting.reach)); // a handle outside could not be taken back
    element(id).style.left = `${box.left + (box.width / 2) * (1 + within(x))}px`;
    element(id).style.top = `${box.top + (box.height / 2) * (1 - within(y))}px`;
    element(id).setAttribute("aria-label", words);
  };
  const w = kernelOf(setting);
  const where = ([x, y]) => `${x.toFixed(2)}, ${y.toFixed(2)}`;
  put("handle-w", w, `Kernel w at ${where(w)}: drag it, or turn it with ← and →, lengthen it with ↑ and ↓`);
  put("handle-x", setting.x, `Input x at ${where(setting.x)}: drag it, or move it with the arrow keys`);
}

function moveKernel(setting, [x, y]) {
  const length = Math.hypot(x, y);
  if (length === 0) return;
  setting.wAngle = Number(Math.atan2(y, x).toFixed(4));
  if (setting.weighting !== null) setting.wNorm = Number(Math.max(LEAST_LENGTH, length).toFixed(3));
}

const moveInput = (setting, point) => (setting.x = point.map((v) => Number(v.toFixed(3))));

function listenToPlane(setting, changed) {
  const canvas = element("plane-plot");
  const pointOf = (event) => {
    const box = planeBox(canvas);
    const place = canvas.getBoundingClientRect();
    const across = (event.clientX - place.left - box.left) / box.width;
    const down = (event.clientY - place.top - box.top) / box.height;
    return [(2 * across - 1) * setting.reach, (1 - 2 * down) * setting.reach];
  };
  for (const [id, move] of [["handle-w", moveKernel], ["handle-x", moveInput]]) {
    const handle = element(id);
    handle.addEventListener("pointerdown", (event) => handle.setPointerCapture(event.pointerId));
    handle.addEventListener("pointermove", (event) => {
      if (!handle.hasPointerCapture(event.pointerId)) return;
      move(setting, pointOf(event));
      changed({});
    });
  }
  canvas.addEventListener("click", (event) => {
    const point = pointOf(event);
    if (point.some((v) => Math.abs(v) > setting.reach)) return;
    moveInput(setting, point);
    changed({});
  });
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  const onArrow = (id, act) =>
    element(id).addEventListener("keydown", (event) => {
      if (!(event.key in arrows)) return;
      event.preventDefault();
      act(...arrows[event.key]);
      changed({});
    });
  onArrow("handle-x", (across, up) => moveInput(setting, [setting.x[0] + (across * setting.reach) / 30, setting.x[1] + (up * setting.reach) / 30]));
  onArrow("handle-w", (across, up) => {
    setting.wAngle = Number((setting.wAngle - (across * Math.PI) / 36).toFixed(4)); // → turns clockwise
    if (setting.weighting !== null) setting.wNorm = Number(Math.max(LEAST_LENGTH, setting.wNorm + up * 0.05).toFixed(3));
  });
}
