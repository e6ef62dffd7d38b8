// Mouse, touch and keys on the timeline and the overview.

function timeAt(event) {
  const box = byId("rows").getBoundingClientRect();
  return state.from + (event.clientX - box.left - timeline.gutter) / xScale(box.width);
}

// The operation under the pointer: the part that covers it, else the nearest within four pixels.
function operationAt(event) {
  const box = byId("rows").getBoundingClientRect();
  const y = event.clientY - box.top - AXIS + byId("scroller").scrollTop;
  if (event.clientX - box.left < timeline.gutter || event.clientY - box.top < AXIS) return { op: -1, part: -1 };
  const r = timeline.rowTops.findLastIndex((top) => top <= y);
  if (r < 0) return { op: -1, part: -1 };
  const lane = rows[r].lanes[Math.floor((y - timeline.rowTops[r]) / timeline.lane)];
  if (!lane) return { op: -1, part: -1 };
  const at = timeAt(event), slack = 4 / xScale(box.width);
  let best = -1, distance = slack;
  for (let i = firstVisible(lane, at - slack); i < lane.length && parts.start[lane[i]] <= at + slack; i++) {
    const k = lane[i];
    const away = Math.max(parts.start[k] - at, at - parts.end[k], 0) - (isLate(parts.op[k]) ? slack / 2 : 0);
    if (away < distance) [best, distance] = [k, away];
  }
  // A late rank's missing time belongs to its operation, too.
  if (best < 0) {
    for (const cause of culprits) {
      if (cause.row !== r) continue;
      for (const op of cause.ops) if (ops.median[op] <= at && at <= ops.last[op]) return { op, part: -1 };
    }
  }
  return { op: best < 0 ? -1 : parts.op[best], part: best };
}

function showTip(event, { op, part }) {
  const tip = byId("tip");
  tip.hidden = op < 0;
  if (op < 0) return;
  const lines = [element("b", { textContent: `${opTitle(op)} · ${commName(ops.comm[op])}` })];
  lines.push(element("div", { className: "muted", textContent: `${size(ops.bytes[op])} · ${duration(ops.end[op] - ops.first[op])} · ${clock(ops.first[op], 6)} UTC` }));
  if (part >= 0) {
    const wait = parts.move[part] - parts.start[part];
    lines.push(element("div", { textContent: `rank ${rankOf(part)}: waited ${duration(wait)}, moved data for ${duration(parts.end[part] - parts.move[part])}` }));
  }
  if (isLate(op)) lines.push(element("div", { className: "late", textContent: `${culpritName(op)} late by ${duration(ops.lag[op])}` }));
  tip.replaceChildren(...lines);
  const box = byId("timeline").getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 18}px`;
}

function listenRows() {
  const canvas = byId("rows");
  canvas.addEventListener("wheel", (event) => {
    if (event.shiftKey) return; // scrolls the rows
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX * unit / canvas.clientWidth);
    else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * unit / 400))), timeAt(event));
  }, { passive: false });

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    const inAxis = event.clientY - canvas.getBoundingClientRect().top < AXIS;
    drag = { x: event.clientX, from: state.from, to: state.to, at: timeAt(event), range: event.shiftKey || inAxis, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) {
      const found = operationAt(event);
      showTip(event, found);
      if (found.op !== state.hovered) {
        state.hovered = found.op;
        redraw();
      }
      return;
    }
    drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
    if (!drag.moved) return;
    byId("tip").hidden = true;
    if (drag.range) {
      drawNow();
      const box = canvas.getBoundingClientRect(), c = canvas.getContext("2d");
      c.fillStyle = theme.focus;
      c.globalAlpha = 0.2;
      c.fillRect(Math.min(drag.x, event.clientX) - box.left, 0, Math.abs(event.clientX - drag.x), box.height);
      c.globalAlpha = 1;
    } else {
      const moved = (event.clientX - drag.x) / xScale(canvas.clientWidth);
      setWindow(drag.from - moved, drag.to - moved);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { moved, range, at } = drag;
    drag = null;
    if (!moved) select(operationAt(event).op);
    else if (range) setWindow(Math.min(at, timeAt(event)), Math.max(at, timeAt(event)));
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => {
    byId("tip").hidden = true;
    state.hovered = -1;
    redraw();
  });
  canvas.addEventListener("dblclick", (event) => {
    const { op } = operationAt(event);
    if (op >= 0) zoomTo(op);
  });
}

function listenOverview() {
  const canvas = byId("overview");
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return (event.clientX - box.left - timeline.gutter) / (box.width - timeline.gutter) * (tEnd + 2 * margin()) - margin();
  };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    const time = at(event), inside = time >= state.from && time <= state.to && state.to - state.from < tEnd * 0.98;
    drag = { time, from: state.from, to: state.to, inside };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const time = at(event);
    if (drag.inside) setWindow(drag.from + time - drag.time, drag.to + time - drag.time);
    else setWindow(Math.min(time, drag.time), Math.max(time, drag.time));
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const time = at(event), width = state.to - state.from;
    // A click moves the window there; from the whole recording it opens a twentieth.
    if (Math.abs(time - drag.time) * 200 < tEnd) {
      const half = (drag.to - drag.from >= tEnd ? tEnd / 20 : Math.max(width, drag.to - drag.from)) / 2;
      setWindow(time - half, time + half);
    }
    drag = null;
  });
  canvas.addEventListener("dblclick", fitAll);
}

function listenKeys() {
  const actions = {
    w: () => zoom(0.6), "+": () => zoom(0.6), "=": () => zoom(0.6), s: () => zoom(1 / 0.6), "-": () => zoom(1 / 0.6),
    a: () => pan(-0.2), d: () => pan(0.2), 0: fitAll, n: () => stepLate(1), p: () => stepLate(-1),
    f: () => { if (state.selected >= 0) zoomTo(state.selected); },
    l: () => byId("late-only").click(),
    "/": () => { byId("query").focus(); byId("query").select(); },
    Escape: () => select(-1),
  };
  const onCanvas = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => zoom(0.6), ArrowDown: () => zoom(1 / 0.6), Home: fitAll, Enter: actions.f };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target instanceof HTMLInputElement) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const action = (event.target instanceof HTMLCanvasElement && onCanvas[event.key]) ||
      actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (action) {
      event.preventDefault();
      action();
    }
  });
}
