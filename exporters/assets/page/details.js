// The selected operation: who was late and where it lost the time, then each rank's part.

// Says whether the late rank entered its call late or, having called in time, began late on the device.
function cause(op) {
  const late = [], others = [];
  for (let k = ops.part[op]; k < ops.part[op + 1]; k++) (parts.row[k] === ops.culprit[op] ? late : others).push(k);
  const lead = [element("b", { textContent: `${culpritName(op)} arrived ${duration(ops.lag[op])} late` }), " (after the median of the others)."];
  if (!late.length || !others.length) return lead;
  const calls = others.map((k) => parts.call[k]).sort((a, b) => a - b);
  const lateCall = parts.call[late[0]] - calls[calls.length >> 1];
  const queued = parts.start[late[0]] - parts.call[late[0]];
  if (lateCall > 0.8 * ops.lag[op]) lead.push(` It made the call ${duration(lateCall)} late: the time was lost before the call, in the job itself.`);
  else if (lateCall < 0.2 * ops.lag[op]) lead.push(` It made the call in time, but began on the device only ${duration(queued)} later: earlier work held its stream.`);
  else lead.push(` It made the call ${duration(lateCall)} late and then took ${duration(queued)} to begin on the device.`);
  return lead;
}

function copyButton(label, text) {
  const button = element("button", { type: "button", textContent: label });
  button.addEventListener("click", async () => {
    let copied = true;
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      // Without the permission (a page opened from a file, say): the old way, through a selection.
      const area = element("textarea", { value: text(), style: { position: "fixed", opacity: "0" } });
      document.body.append(area);
      area.select();
      copied = document.execCommand("copy");
      area.remove();
    }
    button.textContent = copied ? "Copied" : "Copying is not allowed here";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

const FEW_RANKS = 24;
function rankTable(op, all) {
  const [from, to] = extent(op), width = Math.max(to - from, 1), percent = (ns) => `${ns / width * 100}%`;
  const colour = typeColour(raw.names[ops.name[op]]);
  const list = [];
  for (let k = ops.part[op]; k < ops.part[op + 1]; k++) list.push(k);
  // Few ranks stand in their order; of many, the latest come first.
  const many = list.length > 16;
  if (many) list.sort((a, b) => parts.start[b] - parts.start[a]);
  if (!all) list.length = Math.min(list.length, FEW_RANKS);
  const body = element("tbody");
  for (const k of list) {
    const row = rows[parts.row[k]], late = isLate(op) && parts.row[k] === ops.culprit[op];
    const track = element("div", { className: "track", title: `called ${clock(parts.call[k], 6)}, arrived ${clock(parts.start[k], 6)}, ended ${clock(parts.end[k], 6)} UTC` });
    const bar = (className, a, b, style = {}) =>
      track.append(element("i", { className, style: { left: percent(a - from), width: percent(b - a), ...style } }));
    if (parts.start[k] > parts.call[k]) bar("queued", parts.call[k], parts.start[k]);
    if (late) bar("late", Math.max(from, parts.start[k] - ops.lag[op]), parts.start[k]);
    if (parts.move[k] > parts.start[k]) {
      const stripe = (share) => `color-mix(in srgb, ${colour} ${share}%, transparent)`;
      bar("wait", parts.start[k], parts.move[k], { background: `repeating-linear-gradient(135deg, ${stripe(60)} 0 1.5px, ${stripe(14)} 1.5px 5px)` });
    }
    bar("move", parts.move[k], parts.end[k], { background: colour });
    const arrival = parts.start[k] - ops.first[op];
    const own = rankOf(k) === row.rank ? "" : ` (job rank ${row.rank})`;
    body.append(element("tr", { className: late ? "culprit" : "" },
      element("td", { textContent: rankOf(k) + own, title: `${row.host}, pid ${row.pid}` }),
      element("td", { className: "muted host", textContent: row.host, title: row.host }),
      element("td", { className: "number", textContent: arrival === 0 ? "first" : `+${duration(arrival)}` }),
      element("td", { className: "span" }, track)));
  }
  const heads = [["Rank", ""], ["Host", ""], [many ? "Arrival ↓" : "Arrival", "number"], ["Called – arrived – ended", "span"]];
  const head = element("thead", {}, element("tr", {}, ...heads.map(([textContent, className]) => element("th", { textContent, className, scope: "col" }))));
  return element("table", { id: "ranks" }, head, body);
}

function drawDetails() {
  const panel = byId("details"), op = state.selected;
  panel.dataset.trace = op >= 0 ? ops.trace(op) : "";
  if (op < 0) {
    panel.replaceChildren(element("h3", { textContent: "No operation selected" }),
      element("p", { className: "muted", textContent: "Click one in the timeline or the table, or press N for the next late one." }));
    return;
  }
  const communicator = raw.communicators[ops.comm[op]];
  const seen = ops.part[op + 1] - ops.part[op];
  const content = [element("h3", {}, swatch(op), `${opTitle(op)} · ${commName(ops.comm[op])}`)];
  content.push(element("p", { className: "cause" }, ...(isLate(op) ? cause(op) : [ops.unnamed.has(op) ? unnamedWords(ops.unnamed.get(op)) : "No rank was late beyond the threshold."])));
  if (ops.incomplete[op]) {
    content.push(element("p", { className: "notice", textContent: "Events of this operation were lost; what is shown may lack parts." }));
  }
  const ranks = rankTable(op, false);
  content.push(ranks);
  if (seen > FEW_RANKS) {
    const all = element("button", { type: "button", className: "quiet", textContent: `Show all ${count(seen)} ranks (here: the ${FEW_RANKS} latest)` });
    all.addEventListener("click", () => {
      ranks.replaceWith(rankTable(op, true));
      all.remove();
    });
    content.push(all);
  }
  const facts = [
    ["Started", `${day(ops.first[op])} ${clock(ops.first[op], 6)} UTC`],
    ["Duration", `${duration(ops.end[op] - ops.first[op])}: arriving ${duration(ops.last[op] - ops.first[op])}, moving data ${duration(ops.end[op] - ops.last[op])}`],
    ["Waited", `${duration(ops.waited[op])}, all ranks together`],
    ["Message", `${size(ops.bytes[op])} of ${raw.data_types[ops.type[op]] || "unknown type"}, ${raw.algorithms[ops.algorithm[op]] || "unknown algorithm"}`],
    ["Bus bandwidth", ops.bandwidth[op] ? `${bandwidth(ops.bandwidth[op])} once all had arrived` : "–"],
    ["Communicator", (communicator.name ? `${communicator.name} · ` : "") + communicator.id],
    ["Ranks", `${count(communicator.ranks)}` + (seen < communicator.ranks ? `, ${count(seen)} of them observed` : "")],
  ];
  content.push(element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", { textContent: name }), element("dd", { textContent: value })]),
    element("dt", { textContent: "Trace" }), element("dd", {}, element("code", { id: "trace-id", textContent: ops.trace(op) }))));
  const show = element("button", { type: "button", textContent: "Show in timeline" });
  show.addEventListener("click", () => {
    zoomTo(op);
    byId("timeline").scrollIntoView({ block: "nearest" });
  });
  const link = () => `${location.href.split("#")[0]}#${addressText()}`;
  content.push(element("div", { className: "acts" }, show, copyButton("Copy trace id", () => ops.trace(op)), copyButton("Copy link", link)));
  panel.replaceChildren(...content);
}
