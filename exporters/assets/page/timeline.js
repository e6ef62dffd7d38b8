// The timeline: rows of ranks over time on a canvas, an axis above, an overview of the whole recording.

const AXIS = 24;
const timeline = { gutter: 150, rowTops: [], height: 0, lane: 20, hatches: new Map() };

const viewHeight = () => matchMedia("print").matches ? Infinity : Math.max(220, innerHeight * 0.62);

function layout() {
  const lanes = rows.reduce((sum, row) => sum + row.lanes.length, 0);
  const hosts = new Set(rows.map((row) => row.host)).size;
  // As tall as the room allows, so that all ranks are in sight at once where that leaves them legible.
  const room = viewHeight() - AXIS - 8 * hosts - 3 * rows.length;
  timeline.lane = Math.max(6, Math.min(26, Math.floor(room / lanes)));
  const gap = timeline.lane >= 15 ? 5 : 3;
  let y = 2;
  timeline.rowTops = rows.map((row, r) => {
    // Ranks of one host stand together, with a little air between hosts.
    if (r > 0 && hosts > 1 && rows[r - 1].host !== row.host) y += 6;
    const top = y;
    y += row.lanes.length * timeline.lane + gap;
    return top;
  });
  timeline.height = y + 2;
  const longest = Math.max(...rows.map((row) => row.host.length), 4);
  timeline.gutter = Math.min(210, 74 + longest * 6.4);
  byId("spacer").style.height = `${timeline.height + AXIS}px`;
}

// Waiting is drawn as stripes of the type's colour: less ink than moving, whatever the colours.
function hatch(context, colour) {
  let pattern = timeline.hatches.get(colour);
  if (!pattern) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 12;
    const c = tile.getContext("2d");
    c.globalAlpha = theme.dark ? 0.16 : 0.13;
    c.fillStyle = colour;
    c.fillRect(0, 0, 12, 12);
    c.globalAlpha = 0.6;
    c.strokeStyle = colour;
    c.lineWidth = 1.5;
    for (let x = -12; x <= 24; x += 6) {
      c.beginPath();
      c.moveTo(x, 13);
      c.lineTo(x + 14, -1);
      c.stroke();
    }
    pattern = context.createPattern(tile, "repeat");
    timeline.hatches.set(colour, pattern);
  }
  return pattern;
}

const laneGap = () => timeline.lane >= 12 ? 2 : 1;
const xScale = (width) => (width - timeline.gutter) / (state.to - state.from);

// Steps of 1, 2 or 5 times a power of ten, at least 110 pixels apart.
function tickStep(scale) {
  const least = 110 / scale, power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= least);
}
function tickLabel(at, step) {
  const [unit, ns, places] = step >= 1e8 || tEnd >= 10e9 && step >= 1e6 ? ["s", 1e9, Math.max(0, 9 - Math.floor(Math.log10(step)))]
    : step >= 1e5 ? ["ms", 1e6, Math.max(0, 6 - Math.floor(Math.log10(step)))] : ["µs", 1e3, Math.max(0, 3 - Math.floor(Math.log10(step)))];
  return `${(at / ns).toFixed(Math.min(places, 3))} ${unit}`;
}

function drawRows() {
  const canvas = byId("rows"), scroller = byId("scroller");
  const width = scroller.clientWidth;
  const height = Math.min(timeline.height + AXIS, viewHeight());
  canvas.style.height = `${height}px`;
  const c = fitCanvas(canvas, width, height);
  const scale = xScale(width), left = timeline.gutter, { from, to } = state;
  const x = (ns) => left + (ns - from) * scale;
  const scroll = scroller.scrollTop;

  c.save();
  c.beginPath();
  c.rect(left, AXIS, width - left, height - AXIS);
  c.clip();
  const step = tickStep(scale);
  c.fillStyle = theme.line;
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) c.fillRect(Math.round(x(at)), AXIS, 1, height);
  for (const op of [state.hovered, state.selected]) {
    if (op < 0) continue;
    const [a, b] = extent(op);
    c.fillStyle = op === state.selected ? theme.chosen : theme.hover;
    c.fillRect(x(a) - 3, AXIS, Math.max((b - a) * scale, 1) + 6, height);
  }
  rows.forEach((row, r) => {
    const top = timeline.rowTops[r] + AXIS - scroll;
    if (top > height || top + row.lanes.length * timeline.lane < AXIS) return;
    row.lanes.forEach((lane, l) => drawLane(c, lane, top + l * timeline.lane, x, scale, width));
  });
  rows.forEach((row, r) => {
    const top = timeline.rowTops[r] + AXIS - scroll;
    if (row.late && top < height) drawLate(c, r, top, x, width);
  });
  if (state.selected >= 0) outline(c, state.selected, x, scale, scroll);
  c.restore();
  drawLabels(c, height, scroll);
  drawAxis(c, width, step, x);
}

// Index of the first part of a lane that ends after `from`; parts of a lane follow each other.
function firstVisible(lane, from) {
  let low = 0, high = lane.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (parts.end[lane[middle]] < from) low = middle + 1; else high = middle;
  }
  return low;
}

function drawLane(c, lane, top, x, scale, width) {
  const height = timeline.lane - laneGap(), middle = Math.round(top + height / 2);
  // Parts narrower than a pixel and a half are gathered per pixel column: below, the share of moving, above it that of
  // waiting, fainter the less of the column they fill.
  let column = -1, wait = 0, move = 0, widest = -1, colour = "";
  const flush = () => {
    if (column < 0) return;
    const full = wait + move, share = full > 0 ? move / full : 1;
    const strength = 0.3 + 0.7 * Math.min(1, full * scale);
    c.fillStyle = colour;
    c.globalAlpha = strength;
    c.fillRect(column, top + height * (1 - share), 1, height * share);
    c.globalAlpha = strength * 0.32;
    c.fillRect(column, top, 1, height * (1 - share));
    c.globalAlpha = 1;
    column = -1;
    wait = move = 0;
    widest = -1;
  };
  for (let i = firstVisible(lane, state.from); i < lane.length; i++) {
    const k = lane[i], op = parts.op[k];
    if (parts.start[k] > state.to) break;
    const x0 = x(parts.start[k]), x1 = x(parts.end[k]);
    const type = state.matches[op] ? typeColour(raw.names[ops.name[op]]) : theme.dim;
    if (x1 - x0 < 1.5) {
      const at = Math.floor(x0);
      if (at !== column) {
        flush();
        column = at;
      }
      const length = parts.end[k] - parts.start[k] + (state.matches[op] ? 1 : 0);
      if (length > widest && (state.matches[op] || colour === theme.dim || widest < 0)) [widest, colour] = [length, type];
      wait += parts.move[k] - parts.start[k];
      move += parts.end[k] - parts.move[k] || 1;
      continue;
    }
    flush();
    const xm = Math.min(Math.max(x(parts.move[k]), x0), x1);
    const call = x(parts.call[k]);
    if (x0 - call > 3) {
      c.fillStyle = theme.muted;
      c.fillRect(call, middle, x0 - call, 1);
      c.fillRect(call, middle - 3, 1, 7);
    }
    if (xm - x0 > 0.4) {
      if (xm - x0 < 7 || !state.matches[op]) {
        c.globalAlpha = state.matches[op] ? 0.34 : 0.5;
        c.fillStyle = type;
      } else c.fillStyle = hatch(c, type);
      c.fillRect(x0, top, xm - x0, height);
      c.globalAlpha = 1;
    }
    const end = Math.max(x1 - (x1 - xm > 4 ? 0.5 : 0), xm + 1);
    c.fillStyle = type;
    c.fillRect(xm, top, end - xm, height);
    if (timeline.lane >= 15 && state.matches[op]) label(c, op, x0, xm, end, top, width);
  }
  flush();
}

// The operation's name where there is room for it: in the moving part, else over the waiting part.
function label(c, op, from, move, to, top, width) {
  const shown = (a, b) => Math.min(b, width) - Math.max(a, timeline.gutter);
  const waits = shown(move, to) < 64;
  if (waits && shown(from, move) < 190) return;
  const left = Math.max(waits ? from : move, timeline.gutter) + 6, right = Math.min(waits ? move : to, width) - 4;
  const text = `${opTitle(op)}  ${size(ops.bytes[op])}`;
  c.save();
  c.font = `11px ${theme.font}`;
  c.textBaseline = "middle";
  c.beginPath();
  c.rect(left - 6, top, right - left + 6, timeline.lane - 2);
  c.clip();
  if (waits) {
    c.fillStyle = theme.ground;
    c.globalAlpha = 0.86;
    c.fillRect(left - 4, top + 3, c.measureText(text).width + 8, timeline.lane - 8);
    c.globalAlpha = 1;
  }
  c.fillStyle = waits ? theme.text : theme.dark ? "#0c0e10" : "#fff";
  c.fillText(text, left, top + timeline.lane / 2 - 0.5);
  c.restore();
}

// A late rank's missing time, from the others' median arrival to its own, and its arrival as a line that never gets
// thinner than two pixels: what is late must be seen at any zoom.
function drawLate(c, row, rowTop, x, width) {
  const height = timeline.lane - laneGap();
  for (const cause of culprits) {
    if (cause.row !== row) continue;
    for (const op of cause.ops) {
      if (ops.last[op] < state.from || ops.median[op] > state.to) continue;
      let part = ops.part[op];
      while (part < ops.part[op + 1] && parts.row[part] !== row) part++;
      if (part === ops.part[op + 1]) continue;
      const top = rowTop + parts.lane[part] * timeline.lane;
      const x1 = x(parts.start[part]), x0 = Math.min(x(parts.start[part] - ops.lag[op]), x1);
      c.globalAlpha = state.matches[op] ? 1 : 0.25;
      c.fillStyle = theme["late-soft"];
      c.fillRect(x0, top, x1 - x0, height);
      c.fillStyle = theme.late;
      c.fillRect(x0, top + height - 2, x1 - x0, 2);
      c.fillRect(x1 - 2, top - 2, 2, height + 4);
      const room = Math.min(x1, width) - Math.max(x0, timeline.gutter);
      if (room > 34 && timeline.lane >= 12) {
        const text = room > 92 ? `late ${duration(ops.lag[op])}` : "late";
        c.font = `600 11px ${theme.font}`;
        c.textBaseline = "middle";
        c.textAlign = "right";
        c.fillText(text, Math.min(x1, width) - 6, top + height / 2 - 0.5);
        c.textAlign = "left";
      }
      c.globalAlpha = 1;
    }
  }
}

function outline(c, op, x, scale, scroll) {
  c.strokeStyle = theme.text;
  c.lineWidth = timeline.lane >= 12 ? 1.5 : 1;
  for (let k = ops.part[op]; k < ops.part[op + 1]; k++) {
    const top = timeline.rowTops[parts.row[k]] + parts.lane[k] * timeline.lane + AXIS - scroll;
    const a = x(parts.start[k]);
    c.strokeRect(a - 1, top - 0.5, Math.max((parts.end[k] - parts.start[k]) * scale, 1) + 2, timeline.lane - laneGap() + 1);
  }
}

// Scrolls a row into sight where not all rows are.
function showRow(r) {
  const scroller = byId("scroller"), top = timeline.rowTops[r], tall = rows[r].lanes.length * timeline.lane;
  const seen = scroller.clientHeight - AXIS;
  if (top < scroller.scrollTop || top + tall > scroller.scrollTop + seen) scroller.scrollTop = top - (seen - tall) / 2;
}

function drawLabels(c, height, scroll) {
  const left = timeline.gutter;
  c.save();
  c.beginPath();
  c.rect(0, AXIS, left, height - AXIS);
  c.clip();
  c.textBaseline = "middle";
  let host = null;
  rows.forEach((row, r) => {
    const top = timeline.rowTops[r] + AXIS - scroll, tall = row.lanes.length * timeline.lane - laneGap();
    const centre = top + tall / 2 + 0.5;
    if (top < height && top + tall > AXIS) {
      c.font = `${row.late ? 600 : 400} ${tall >= 12 ? 12 : 10}px ${theme.font}`;
      c.fillStyle = row.late ? theme.late : theme.text;
      if (tall >= 9 || r % 2 === 0 || row.late) c.fillText(`rank ${row.rank}`, 0, centre);
      if (row.host !== host || top - timeline.lane < AXIS) {
        c.font = `12px ${theme.font}`;
        c.fillStyle = theme.muted;
        c.textAlign = "right";
        c.fillText(row.host, left - 12, centre, left - 70);
        c.textAlign = "left";
      }
    }
    host = row.host;
  });
  c.restore();
}

function drawAxis(c, width, step, x) {
  const left = timeline.gutter;
  c.font = `11px ${theme.font}`;
  c.textBaseline = "middle";
  c.fillStyle = theme.muted;
  c.fillText(`${clock(Math.max(state.from, 0))} UTC`, 0, AXIS / 2, left - 8);
  c.fillStyle = theme["line-strong"];
  c.fillRect(0, AXIS - 1, width, 1);
  for (let at = Math.ceil(state.from / step) * step; at <= state.to; at += step) {
    const px = Math.round(x(at));
    c.fillStyle = theme["line-strong"];
    c.fillRect(px, AXIS - 6, 1, 5);
    const label = (at > 0 ? "+" : "") + tickLabel(at, step);
    if (px + 5 + c.measureText(label).width > width) continue;
    c.fillStyle = theme.muted;
    c.fillText(label, px + 5, AXIS / 2 - 1);
  }
}

// ---- overview

const overview = { width: 0, activity: null, lost: null };
function summarise(width) {
  if (overview.width === width) return;
  overview.width = width;
  overview.activity = new Float64Array(width);
  overview.lost = new Float64Array(width);
  const perPixel = (tEnd + 2 * margin()) / width, zero = -margin();
  for (let k = 0; k < parts.n; k++) {
    const a = (parts.move[k] - zero) / perPixel, b = (parts.end[k] - zero) / perPixel;
    for (let i = Math.floor(a); i <= b && i < width; i++) overview.activity[i] += Math.max(0, Math.min(b, i + 1) - Math.max(a, i));
  }
  for (let op = 0; op < ops.n; op++) {
    if (isLate(op)) overview.lost[Math.min(width - 1, Math.floor((ops.last[op] - zero) / perPixel))] += ops.waited[op];
  }
}

function drawOverview() {
  const canvas = byId("overview"), width = canvas.clientWidth, height = 46;
  if (!width) return;
  const c = fitCanvas(canvas, width, height), left = timeline.gutter, inner = Math.max(1, Math.floor(width - left));
  summarise(inner);
  const most = Math.max(...overview.lost, 1), x = overviewX(inner);
  c.font = `11px ${theme.font}`;
  c.textBaseline = "middle";
  c.fillStyle = theme.muted;
  c.fillText("moving data", 0, 36, left - 8);
  if (culprits.length) {
    c.fillStyle = theme.late;
    c.fillText("waited for late", 0, 12, left - 8);
  }
  c.fillStyle = theme.panel;
  c.fillRect(left, 0, inner, height);
  const part = state.to - state.from < tEnd;
  if (part) {
    c.fillStyle = theme.chosen;
    c.fillRect(x(state.from), 0, Math.max(2, x(state.to) - x(state.from)), height);
  }
  c.fillStyle = theme.activity;
  for (let i = 0; i < inner; i++) {
    const tall = Math.min(1, overview.activity[i] / rows.length) * 18;
    if (overview.activity[i] > 0) c.fillRect(left + i, height - Math.max(1, tall), 1, Math.max(1, tall));
  }
  c.fillStyle = theme.late;
  for (let i = 0; i < inner; i++) {
    if (overview.lost[i] > 0) {
      const tall = Math.max(3, overview.lost[i] / most * 24);
      c.fillRect(left + i - 0.5, 26 - tall, 2, tall);
    }
  }
  if (!part) return;
  c.strokeStyle = theme.focus;
  c.lineWidth = 1;
  c.strokeRect(Math.round(x(state.from)) + 0.5, 0.5, Math.max(2, Math.round(x(state.to) - x(state.from)) - 1), height - 1);
}
const overviewX = (inner) => (ns) => timeline.gutter + (ns + margin()) / (tEnd + 2 * margin()) * inner;

let drawing = 0;
function redraw() {
  if (drawing) return;
  drawing = requestAnimationFrame(drawNow);
}
function drawNow() {
  drawing = 0;
  const began = performance.now();
  drawOverview();
  drawRows();
  document.documentElement.dataset.frameMs = (performance.now() - began).toFixed(1);
}
