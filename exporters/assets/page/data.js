// What the page knows: the recording as typed arrays, what follows from it, and how to say it in words.
// Times are nanoseconds after `data.t0` (Unix nanoseconds, as text: it does not fit a number).

const raw = JSON.parse(document.getElementById("data").textContent);
const t0 = BigInt(raw.t0);

const ops = (() => {
  const source = raw.operations, n = source.start.length;
  const o = {
    n, start: new Float64Array(n), first: new Float64Array(n), last: new Float64Array(n), end: new Float64Array(n),
    median: new Float64Array(n), waited: new Float64Array(n), bandwidth: new Float64Array(n), part: new Uint32Array(n + 1),
    name: source.name, comm: source.communicator, sequence: source.sequence, replay: source.replay, bytes: source.bytes,
    type: source.data_type, algorithm: source.algorithm, culprit: source.culprit, culpritRank: source.culprit_rank,
    lag: source.lag, incomplete: new Uint8Array(n),
    trace: (i) => source.trace.slice(32 * i, 32 * i + 32),
    indexOf: (trace) => {
      for (let at = source.trace.indexOf(trace); at >= 0; at = source.trace.indexOf(trace, at + 1)) {
        if (at % 32 === 0) return at / 32;
      }
      return -1;
    },
  };
  let at = 0;
  for (let i = 0; i < n; i++) {
    o.start[i] = at += source.start[i];
    o.part[i + 1] = o.part[i] + source.parts[i];
  }
  for (const i of source.incomplete) o.incomplete[i] = 1;
  o.waitedUntil = new Float64Array(n);
  for (const [i, after] of source.waited_until) o.waitedUntil[i] = o.start[i] + after;
  // By operation: nobody can say which rank was late. Who waited, for whom and how long; -1 where that is not known.
  o.unnamed = new Map(source.unnamed.map(([i, rank, peer, wait]) => [i, { op: i, rank, peer, wait }]));
  return o;
})();

// Why no late rank is named, in words.
function unnamedWords({ op, rank, peer, wait }) {
  const seen = ops.part[op + 1] - ops.part[op];
  return `Only ${count(seen)} of ${count(raw.communicators[ops.comm[op]].ranks)} ranks are watched here, and the library does not say who arrived last. ` +
    (rank < 0 ? "Watch all nodes to name the late rank." : `Rank ${rank} waited ${duration(wait)} for rank ${peer}, which is not watched here and may have waited itself.`);
}

// Bus bandwidth over algorithm bandwidth (nccl-tests, PERFORMANCE.md).
function busFactor(name, ranks) {
  if (ranks < 2) return 1;
  if (name === "all_reduce") return 2 * (ranks - 1) / ranks;
  return ["all_gather", "reduce_scatter", "alltoall", "gather", "scatter"].includes(name) ? (ranks - 1) / ranks : 1;
}

// A part is one rank's share of an operation. It waits until the last rank arrives, unless it ended before that:
// then (a broadcast's root, say) it waited for nobody.
const parts = (() => {
  const source = raw.parts, n = source.row.length;
  const p = {
    n, op: new Uint32Array(n), row: Uint32Array.from(source.row), rank: source.rank ?? null, lane: new Uint8Array(n),
    call: new Float64Array(n), start: new Float64Array(n), move: new Float64Array(n), end: new Float64Array(n),
  };
  for (let i = 0; i < ops.n; i++) {
    let first = Infinity, last = -Infinity, end = -Infinity;
    for (let k = ops.part[i]; k < ops.part[i + 1]; k++) {
      p.op[k] = i;
      p.start[k] = ops.start[i] + source.start[k];
      p.end[k] = p.start[k] + source.length[k];
      p.call[k] = source.call[k] < 0 ? p.start[k] : ops.start[i] + source.call[k];
      first = Math.min(first, p.start[k]);
      last = Math.max(last, p.start[k]);
      end = Math.max(end, p.end[k]);
    }
    if (first === Infinity) first = last = end = ops.start[i];
    if (ops.culprit[i] < 0 && ops.culpritRank[i] >= 0) {
      // A late rank that is not watched here: it arrived so long after the others' median, and before the end.
      const starts = p.start.slice(ops.part[i], ops.part[i + 1]).sort();
      last = Math.min(end, Math.max(last, (starts[starts.length >> 1] ?? first) + ops.lag[i]));
    }
    // Where watchdogs say whom the ranks waited for, all have come and nothing moved until then.
    const until = Math.max(last, Math.min(ops.waitedUntil[i], end));
    ops.first[i] = first;
    ops.last[i] = last;
    ops.end[i] = end;
    let waited = 0;
    const others = [];
    for (let k = ops.part[i]; k < ops.part[i + 1]; k++) {
      p.move[k] = p.end[k] < last ? p.start[k] : Math.min(until, p.end[k]);
      waited += p.move[k] - p.start[k];
      if (p.row[k] !== ops.culprit[i]) others.push(p.start[k]);
    }
    others.sort((a, b) => a - b);
    const half = others.length >> 1;
    ops.median[i] = others.length === 0 ? first : others.length % 2 ? others[half] : (others[half - 1] + others[half]) / 2;
    ops.waited[i] = waited;
    const moving = end - until;
    const factor = busFactor(raw.names[ops.name[i]], raw.communicators[ops.comm[i]].ranks);
    ops.bandwidth[i] = moving > 0 ? ops.bytes[i] * factor / (moving / 1e9) : 0;
  }
  return p;
})();
const rankOf = (part) => parts.rank ? parts.rank[part] : raw.rows[parts.row[part]].rank;
const isLate = (op) => ops.lag[op] > 0;
const tEnd = ops.n ? ops.end.reduce((a, b) => Math.max(a, b), 0) : 1;

// Parts of a row that overlap in time get lanes of their own, at most six.
const rows = raw.rows.map((row) => ({ ...row, lanes: [], late: 0 }));
(() => {
  const byRow = rows.map(() => []);
  for (let k = 0; k < parts.n; k++) byRow[parts.row[k]].push(k);
  byRow.forEach((list, r) => {
    list.sort((a, b) => parts.start[a] - parts.start[b]);
    const ends = [];
    for (const k of list) {
      let lane = ends.findIndex((end) => end <= parts.start[k]);
      if (lane < 0) lane = ends.length < 6 ? ends.length : ends.indexOf(Math.min(...ends));
      ends[lane] = Math.max(ends[lane] ?? 0, parts.end[k]);
      parts.lane[k] = lane;
      (rows[r].lanes[lane] ??= []).push(k);
    }
    if (!ends.length) rows[r].lanes.push([]);
    rows[r].lanes = rows[r].lanes.map((lane) => Uint32Array.from(lane));
  });
})();

// Culprits, by how long the others waited for them in all.
const culprits = (() => {
  const found = new Map();
  for (let i = 0; i < ops.n; i++) {
    if (!isLate(i)) continue;
    const key = ops.culprit[i] >= 0 ? ops.culprit[i] : `unseen ${ops.culpritRank[i]}`;
    let c = found.get(key);
    if (!c) found.set(key, c = { row: ops.culprit[i], rank: ops.culpritRank[i], ops: [], waited: 0, worst: 0 });
    c.ops.push(i);
    c.waited += ops.waited[i];
    c.worst = Math.max(c.worst, ops.lag[i]);
    if (c.row >= 0) rows[c.row].late++;
  }
  const list = [...found.values()].sort((a, b) => b.waited - a.waited);
  for (const c of list) {
    const lags = c.ops.map((i) => ops.lag[i]).sort((a, b) => a - b);
    c.median = lags[lags.length >> 1];
    if (c.row >= 0) c.rank = rows[c.row].rank;
    c.name = `rank ${c.rank}`;
  }
  return list;
})();

// What watchdogs found wrong: open before ended, the longest first.
const STATES = ["HANG", "ENDED"];
const findings = [...raw.findings].sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state) || b.waited - a.waited);
// Ranks that are late in every step, the costliest first.
const chronic = raw.stragglers.filter((straggler) => straggler.chronic);
const shareWords = (share) => `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
const openFindings = findings.filter((finding) => finding.state !== "ENDED");

// ---- words

const count = (n) => n.toLocaleString("en");
const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;
const digits = (x) => x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2);

function duration(ns) {
  const a = Math.abs(ns);
  if (a < 1e3) return `${Math.round(ns)} ns`;
  if (a < 999.5e3) return `${digits(ns / 1e3)} µs`;
  if (a < 999.5e6) return `${digits(ns / 1e6)} ms`;
  if (a < 120e9) return `${digits(ns / 1e9)} s`;
  if (a < 7200e9) return `${Math.floor(ns / 60e9)} min ${Math.round(ns / 1e9 % 60)} s`;
  return `${Math.floor(ns / 3600e9)} h ${Math.round(ns / 60e9 % 60)} min`;
}
function rankTime(ns) {
  return ns < 60e9 ? `${digits(ns / 1e9)} rank-seconds` : ns < 7200e9 ? `${digits(ns / 60e9)} rank-minutes` : `${digits(ns / 3600e9)} rank-hours`;
}
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let u = 0;
  for (; bytes >= 1024 && u < units.length - 1; u++) bytes /= 1024;
  return `${u === 0 || Number.isInteger(bytes) ? bytes : digits(bytes)} ${units[u]}`;
}
const bandwidth = (bytes) => bytes <= 0 ? "–" : bytes >= 1e9 ? `${digits(bytes / 1e9)} GB/s` : `${digits(bytes / 1e6)} MB/s`;

// Wall-clock time, UTC: hours to `places` decimals of a second.
function clock(ns, places = 3) {
  const at = t0 + BigInt(Math.round(ns));
  const fraction = (at % 1000000000n).toString().padStart(9, "0").slice(0, places);
  return new Date(Number(at / 1000000n)).toISOString().slice(11, 19) + (places ? "." + fraction : "");
}
const day = (ns) => new Date(Number((t0 + BigInt(Math.round(ns))) / 1000000n)).toISOString().slice(0, 10);
const commName = (i) => raw.communicators[i].name || raw.communicators[i].id.slice(0, 8);
const culpritName = (op) => !isLate(op) ? "" : `rank ${ops.culprit[op] >= 0 ? rows[ops.culprit[op]].rank : ops.culpritRank[op]}`;
const opTitle = (op) => `${raw.names[ops.name[op]]} #${ops.sequence[op]}` + (ops.replay[op] ? ` replay ${ops.replay[op]}` : "");

// ---- search

const QUERY_HELP = "Words match operation, communicator, data type and algorithm. Also: rank:3, host:node-a, culprit:3, seq:17, " +
  "comm:dp, size>1MiB, lag>10ms, duration>5ms, trace:4bf9, late, incomplete; a leading − negates.";

function quantity(text) {
  const match = /^([\d.]+)\s*([a-zµ]*)$/i.exec(text);
  const unit = match && { "": 1, ns: 1, us: 1e3, "µs": 1e3, ms: 1e6, s: 1e9, b: 1, kib: 1024, mib: 2 ** 20, gib: 2 ** 30,
    kb: 1e3, mb: 1e6, gb: 1e9 }[match[2].toLowerCase()];
  return unit ? Number(match[1]) * unit : NaN;
}

// A predicate over operation numbers, or a message that says which word is not understood.
function parseQuery(text) {
  const tests = [];
  const some = (op, test) => {
    for (let k = ops.part[op]; k < ops.part[op + 1]; k++) if (test(k)) return true;
    return false;
  };
  for (let word of text.toLowerCase().split(/\s+/).filter(Boolean)) {
    const negated = word.length > 1 && /^[-−]/.test(word);
    if (negated) word = word.slice(1);
    let test;
    const pair = /^([a-z]+)(:|=|<|>)(.*)$/.exec(word);
    if (pair) {
      const [, key, operator, value] = pair;
      const compare = (column) => {
        const limit = quantity(value);
        if (Number.isNaN(limit)) return undefined;
        if (operator === "<") return (op) => column(op) < limit;
        if (operator === ">") return (op) => column(op) > limit;
        return (op) => column(op) === limit;
      };
      const number = /^\d+$/.test(value) ? Number(value) : NaN;
      switch (key) {
        case "rank": if (!Number.isNaN(number)) test = (op) => some(op, (k) => rows[parts.row[k]].rank === number); break;
        case "culprit": if (!Number.isNaN(number)) test = (op) => culpritName(op) === `rank ${number}`; break;
        case "host": test = (op) => some(op, (k) => rows[parts.row[k]].host.toLowerCase().includes(value)); break;
        case "seq": test = compare((op) => ops.sequence[op]); break;
        case "replay": test = compare((op) => ops.replay[op]); break;
        case "size": test = compare((op) => ops.bytes[op]); break;
        case "lag": test = compare((op) => ops.lag[op]); break;
        case "duration": test = compare((op) => ops.end[op] - ops.first[op]); break;
        case "comm": test = (op) => {
          const comm = raw.communicators[ops.comm[op]];
          return comm.name.toLowerCase().includes(value) || comm.id.startsWith(value);
        }; break;
        case "type": test = (op) => raw.names[ops.name[op]].includes(value); break;
        case "trace": test = (op) => ops.trace(op).startsWith(value); break;
      }
      if (!test) return { error: `“${word}” is not understood.` };
    } else if (word === "late") test = isLate;
    else if (word === "incomplete") test = (op) => ops.incomplete[op] === 1;
    else if (/^#?\d+$/.test(word)) {
      const number = Number(word.replace("#", ""));
      test = (op) => ops.sequence[op] === number;
    } else {
      test = (op) => raw.names[ops.name[op]].includes(word) || commName(ops.comm[op]).toLowerCase().includes(word) ||
        raw.data_types[ops.type[op]].includes(word) || raw.algorithms[ops.algorithm[op]].includes(word) ||
        (word.length >= 6 && ops.trace(op).startsWith(word));
    }
    tests.push(negated ? (op) => !test(op) : test);
  }
  return { test: (op) => tests.every((test) => test(op)) };
}

// ---- elements

// Names come from users: text only ever enters the page as text nodes.
function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "style") Object.assign(node.style, value);
    else if (key in node && !key.startsWith("aria")) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
const byId = (id) => document.getElementById(id);
const typeColour = (name) => theme.types[name] ?? theme.types.other;
const swatch = (op) => element("i", { className: "swatch", style: { background: typeColour(raw.names[ops.name[op]]) } });

// Colours live in the style sheet alone; drawing reads them here, again when the scheme changes.
const TYPES = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv", "alltoall", "reduce", "gather", "scatter", "other"];
const theme = { types: {} };
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  for (const name of ["ground", "panel", "line", "line-strong", "text", "muted", "focus", "late", "late-soft", "dim", "activity", "chosen", "hover"]) {
    theme[name] = value(name);
  }
  for (const type of TYPES) theme.types[type] = value(`t-${type}`);
  theme.font = style.fontFamily;
  theme.dark = matchMedia("(prefers-color-scheme: dark)").matches && !matchMedia("print").matches;
}

// A canvas as large as its box, in device pixels; drawing is in CSS pixels.
function fitCanvas(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
