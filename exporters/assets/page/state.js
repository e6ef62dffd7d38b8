// What is shown: the filter, the selection and the window of time; and how they change.

const state = {
  query: "", lateOnly: false, hidden: new Set(), matches: new Uint8Array(ops.n).fill(1), shown: ops.n,
  selected: -1, hovered: -1, from: 0, to: tEnd, sort: { column: null, descending: true },
};

// What cost most comes first, where anything did.
const usualSort = () => culprits.length ? { column: "waited", descending: true } : { column: "start", descending: false };

const listeners = { view: [], selection: [], filter: [] };
const on = (what, listener) => listeners[what].push(listener);
const changed = (what) => { for (const listener of listeners[what]) listener(); };

const MIN_WINDOW = 1000; // a microsecond
const margin = () => Math.max(tEnd * 0.01, 1);

function setWindow(from, to) {
  const width = Math.min(Math.max(to - from, MIN_WINDOW), tEnd + 2 * margin());
  const centre = (from + to) / 2;
  from = Math.min(Math.max(centre - width / 2, -margin()), tEnd + margin() - width);
  [state.from, state.to] = [from, from + width];
  changed("view");
}
const fitAll = () => setWindow(-margin(), tEnd + margin());
function zoom(factor, centre = (state.from + state.to) / 2) {
  setWindow(centre - (centre - state.from) * factor, centre + (state.to - centre) * factor);
}
const pan = (share) => {
  const step = (state.to - state.from) * share;
  setWindow(state.from + step, state.to + step);
};
// What an operation takes in the picture: from the first call or arrival to the last end.
function extent(op) {
  let from = ops.first[op];
  for (let k = ops.part[op]; k < ops.part[op + 1]; k++) from = Math.min(from, parts.call[k]);
  return [from, ops.end[op]];
}
function zoomTo(op) {
  const [from, to] = extent(op);
  const around = Math.max((to - from) * 0.35, MIN_WINDOW);
  setWindow(from - around, to + around);
}
// Brings an operation into the window, and close enough to be seen, without a jump when it is already.
function reveal(op) {
  const [from, to] = extent(op);
  const width = state.to - state.from;
  if ((to - from) * 400 < width) setWindow(from - (to - from) * 12, to + (to - from) * 12);
  else if (to - from > width) zoomTo(op);
  else if (from < state.from || to > state.to) setWindow((from + to - width) / 2, (from + to + width) / 2);
}

function select(op, { show = false } = {}) {
  state.selected = op;
  if (show && op >= 0) reveal(op);
  changed("selection");
}

function setQuery(query) {
  const parsed = parseQuery(query);
  state.query = query;
  byId("query").classList.toggle("wrong", !!parsed.error);
  byId("query-help").hidden = !parsed.error;
  byId("query-help").textContent = parsed.error ? `${parsed.error} ${QUERY_HELP}` : "";
  if (!parsed.error) applyFilter(parsed.test);
}
let queryTest = () => true;
function applyFilter(test = queryTest) {
  queryTest = test;
  state.shown = 0;
  for (let i = 0; i < ops.n; i++) {
    const match = !state.hidden.has(ops.name[i]) && (!state.lateOnly || isLate(i)) && test(i);
    state.matches[i] = match ? 1 : 0;
    state.shown += state.matches[i];
  }
  changed("filter");
}

// The next late operation among those shown, forwards or backwards from the selection or the window's middle.
function stepLate(direction) {
  const from = state.selected >= 0 ? ops.last[state.selected] : (state.from + state.to) / 2;
  let best = -1;
  for (let i = 0; i < ops.n; i++) {
    if (!isLate(i) || !state.matches[i] || i === state.selected) continue;
    const ahead = (ops.last[i] - from) * direction;
    if (ahead > 0 || (ahead === 0 && (i - state.selected) * direction > 0)) {
      if (best < 0 || ahead < (ops.last[best] - from) * direction) best = i;
    }
  }
  if (best >= 0) select(best, { show: true });
}

// ---- the address: #q=late&hide=broadcast&sort=-lag&sel=<trace id>&t=<from>-<to> (nanoseconds after the recording's start)

function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  state.hidden = new Set((wanted.get("hide") ?? "").split(",").map((name) => raw.names.indexOf(name)).filter((i) => i >= 0));
  state.lateOnly = wanted.get("late") === "1";
  const sort = /^(-?)([a-z]+)$/.exec(wanted.get("sort") ?? "");
  if (sort && COLUMNS.some((column) => column.key === sort[2])) state.sort = { column: sort[2], descending: sort[1] === "-" };
  byId("query").value = wanted.get("q") ?? "";
  setQuery(byId("query").value);
  const selected = wanted.has("sel") ? ops.indexOf(wanted.get("sel").toLowerCase()) : -1;
  const window = /^(-?[\d.]+)-(-?[\d.]+)$/.exec(wanted.get("t") ?? "");
  if (window) setWindow(Number(window[1]), Number(window[2]));
  else if (selected >= 0) zoomTo(selected);
  else fitAll();
  select(selected);
}
let writing = 0;
function writeAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", "#" + addressText()), 250);
}
function addressText() {
  const wanted = new URLSearchParams();
  if (state.query) wanted.set("q", state.query);
  if (state.lateOnly) wanted.set("late", "1");
  if (state.hidden.size) wanted.set("hide", [...state.hidden].map((i) => raw.names[i]).join(","));
  if (state.selected >= 0) wanted.set("sel", ops.trace(state.selected));
  if (state.to - state.from < tEnd) wanted.set("t", `${Math.round(state.from)}-${Math.round(state.to)}`);
  const { column, descending } = state.sort, usual = usualSort();
  if (column !== usual.column || descending !== usual.descending) wanted.set("sort", (descending ? "-" : "") + column);
  return wanted.toString();
}
