// The table of operations: only the rows in sight are in the document, so that its length does not matter.

const ROW = 27;
const COLUMNS = [
  { key: "start", title: "Start", number: true, value: (i) => ops.first[i], text: (i) => `+${(ops.first[i] / 1e9).toFixed(4)} s` },
  { key: "operation", title: "Operation", value: (i) => raw.names[ops.name[i]], text: (i) => raw.names[ops.name[i]] },
  { key: "communicator", title: "Communicator", value: (i) => commName(ops.comm[i]), text: (i) => commName(ops.comm[i]) },
  { key: "seq", title: "Seq", number: true, value: (i) => ops.sequence[i] + ops.replay[i] / 1e9,
    text: (i) => ops.sequence[i] + (ops.replay[i] ? ` ↻${ops.replay[i]}` : "") },
  { key: "size", title: "Size", number: true, value: (i) => ops.bytes[i], text: (i) => size(ops.bytes[i]) },
  { key: "duration", title: "Duration", number: true, value: (i) => ops.end[i] - ops.first[i], text: (i) => duration(ops.end[i] - ops.first[i]),
    hint: "First arrival to last end" },
  { key: "bandwidth", title: "Bus bw", number: true, value: (i) => ops.bandwidth[i], text: (i) => bandwidth(ops.bandwidth[i]),
    hint: "Bus bandwidth (nccl-tests) from the last arrival to the last end" },
  { key: "lag", title: "Lag", number: true, late: true, value: (i) => ops.lag[i], text: (i) => isLate(i) ? duration(ops.lag[i]) : "",
    hint: "The late rank’s arrival minus the median arrival of the others" },
  { key: "culprit", title: "Late rank", late: true, value: culpritName, text: culpritName },
  { key: "waited", title: "Waited", number: true, value: (i) => ops.waited[i], text: (i) => duration(ops.waited[i]),
    hint: "Sum over all ranks of the time between their arrival and the last" },
];
const table = { order: [], place: new Int32Array(ops.n) };

function sortTable() {
  const column = COLUMNS.find((c) => c.key === state.sort.column);
  const keys = new Array(ops.n);
  table.order = [];
  for (let i = 0; i < ops.n; i++) {
    if (!state.matches[i]) continue;
    keys[i] = column.value(i);
    table.order.push(i);
  }
  const sign = state.sort.descending ? -1 : 1;
  table.order.sort(column.number ? (a, b) => sign * (keys[a] - keys[b]) || a - b
    : (a, b) => sign * keys[a].localeCompare(keys[b], "en", { numeric: true }) || a - b);
  table.place.fill(-1);
  table.order.forEach((op, at) => { table.place[op] = at; });
  for (const [at, head] of [...byId("operations").tHead.rows[0].cells].entries()) {
    const sorted = COLUMNS[at].key === state.sort.column;
    if (sorted) head.setAttribute("aria-sort", state.sort.descending ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
    head.firstChild.textContent = COLUMNS[at].title + (sorted ? state.sort.descending ? " ↓" : " ↑" : "");
  }
}

function tableRow(op) {
  const row = element("tr", { "aria-selected": String(op === state.selected), "aria-rowindex": String(table.place[op] + 2) });
  row.dataset.op = op;
  row.dataset.trace = ops.trace(op);
  for (const column of COLUMNS) {
    const cell = element("td", { className: (column.number ? "number " : "") + (column.late && isLate(op) ? "late" : "") });
    if (column.key === "operation") cell.append(swatch(op));
    const text = column.text(op);
    cell.append(text);
    if (text.length > 24) cell.title = text;
    row.append(cell);
  }
  return row;
}

function drawTable() {
  const list = byId("list"), body = byId("operations").tBodies[0];
  const n = table.order.length;
  const from = Math.max(0, Math.floor(list.scrollTop / ROW) - 8);
  const to = Math.min(n, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 8);
  const fill = (rows) => {
    const row = element("tr", { className: "fill", "aria-hidden": "true" }, element("td", { colSpan: COLUMNS.length }));
    row.style.height = `${rows * ROW}px`;
    return row;
  };
  const shown = [fill(from)];
  for (let i = from; i < to; i++) shown.push(tableRow(table.order[i]));
  shown.push(fill(n - to));
  body.replaceChildren(...shown);
  byId("operations").setAttribute("aria-rowcount", String(n + 1));
  byId("nothing").hidden = n > 0;
  byId("nothing").textContent = ops.n ? "No operation matches. Clear the search or the filters." : "No operation has finished yet.";
}

function showInTable(op) {
  const at = table.place[op], list = byId("list");
  if (at < 0) return;
  const top = at * ROW, head = 32;
  if (top < list.scrollTop || top + ROW + head > list.scrollTop + list.clientHeight) list.scrollTop = top - list.clientHeight / 3;
}

function buildTable() {
  const head = byId("operations").tHead.rows[0];
  for (const column of COLUMNS) {
    const button = element("button", { type: "button", textContent: column.title, title: column.hint ?? "" });
    button.addEventListener("click", () => {
      const again = state.sort.column === column.key;
      state.sort = { column: column.key, descending: again ? !state.sort.descending : !!column.number && column.key !== "start" };
      sortTable();
      byId("list").scrollTop = 0;
      drawTable();
      writeAddress();
    });
    head.append(element("th", { scope: "col", className: column.number ? "number" : "" }, button));
  }
  const list = byId("list");
  list.addEventListener("scroll", drawTable, { passive: true });
  byId("operations").tBodies[0].addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-op]");
    if (row) select(Number(row.dataset.op), { show: true });
  });
  list.addEventListener("keydown", (event) => {
    const at = state.selected >= 0 ? table.place[state.selected] : -1;
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 2), last = table.order.length - 1;
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: last }[event.key];
    if (event.key === "Enter" && state.selected >= 0 && event.target === list) zoomTo(state.selected);
    else if (next !== undefined && last >= 0) select(table.order[Math.min(Math.max(next, 0), last)], { show: true });
    else return;
    event.preventDefault();
  });
}
