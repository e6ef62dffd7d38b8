// The top of the page: what an engineer on call must know before anything else.

const FEW = 5;

function drawVerdict() {
  const line = byId("verdict-line"), more = byId("verdict-more");
  const late = culprits.reduce((sum, c) => sum + c.ops.length, 0);
  if (openFindings.length) {
    const [worst] = openFindings;
    line.replaceChildren(element("span", { className: "late", textContent: "Hang: " }), worst.text);
    more.textContent = `Next: ${worst.next}. ` + (openFindings.length > 1 ? `${plural(openFindings.length - 1, "more operation waits", "more operations wait")}. ` : "") +
      (raw.final ? "This was so when the recording ended." : "Reload this page for the newest state.");
  } else if (!ops.n) {
    line.textContent = "No operation has finished yet";
    more.textContent = raw.final ? "The recording ended without one." : "Reload this page later: it is rewritten while the recording goes on.";
  } else if (chronic.length && !late) {
    const [worst] = chronic;
    line.replaceChildren(element("span", { className: "late", textContent: `Rank ${worst.rank}${worst.host ? ` on ${worst.host}` : ""}` }),
      ` is late in every step: ${shareWords(worst.share)} of the time is lost`);
    more.textContent = `It was last in ${count(worst.last)} of ${plural(worst.operations, "operation")} of ${worst.communicator}; its median lag is ${duration(worst.median)}. ` +
      "No single operation reached the threshold.";
  } else if (!late && ops.unnamed.size) {
    const worst = [...ops.unnamed.values()].reduce((a, b) => b.wait > a.wait ? b : a);
    line.textContent = "A rank may have been late, and nobody can say which";
    more.textContent = `In ${plural(ops.unnamed.size, "operation")} of ${count(ops.n)}. ` + unnamedWords(worst);
  } else if (!late) {
    line.textContent = "No rank was late";
    more.textContent = `In ${plural(ops.n, "operation")}, no rank arrived later than the others beyond the threshold.`;
  } else {
    const [worst] = culprits, total = culprits.reduce((sum, c) => sum + c.waited, 0);
    const where = worst.row < 0 ? ", which is not watched here," : rows[worst.row].host ? ` on ${rows[worst.row].host}` : "";
    line.replaceChildren(element("span", { className: "late", textContent: `Rank ${worst.rank}${where}` }),
      ` was late in ${plural(worst.ops.length, "operation")}; the others waited ${rankTime(worst.waited)} for it`);
    const share = Math.round(worst.waited / total * 100);
    more.textContent = `Since ${clock(ops.last[worst.ops[0]])} UTC, at worst by ${duration(worst.worst)}. ` +
      (culprits.length > 1 ? `That is ${share} % of the time lost to late ranks; ${plural(culprits.length - 1, "other rank was", "other ranks were")} late, too. ` : "") +
      `${plural(late, "operation")} of ${count(ops.n)} had a late rank.`;
  }
  const losses = [];
  const incomplete = raw.operations.incomplete.length;
  if (raw.lost) losses.push(`${plural(raw.lost, "event")} lost on the way to the collector.`);
  if (incomplete) losses.push(`${plural(incomplete, "operation lacks", "operations lack")} some events (search for “incomplete”).`);
  if (raw.dropped) losses.push(`The page keeps the latest ${count(ops.n)} operations; ${count(raw.dropped)} earlier ones are not on it.`);
  byId("losses").hidden = !losses.length;
  byId("losses").classList.toggle("bad", raw.lost > 0);
  byId("losses").textContent = losses.join(" ");
}

function drawFindings(all = false) {
  byId("findings").hidden = !findings.length;
  const shown = all ? findings : findings.slice(0, FEW);
  byId("findings").tBodies[0].replaceChildren(...shown.map((finding) => {
    const place = finding.pid === null ? " not watched here" : ` ${finding.host} · pid ${finding.pid}`;
    const row = element("tr", {},
      element("td", { className: finding.state === "ENDED" ? "muted" : "rank", textContent: finding.state }),
      element("td", {}, element("span", { className: "rank", textContent: `rank ${finding.culprit}` }), element("span", { className: "muted", textContent: place })),
      element("td", { textContent: finding.cause }),
      element("td", { textContent: `${finding.operation} (${finding.communicator})` }),
      element("td", { className: "number", textContent: duration(finding.waited) }),
      element("td", { textContent: finding.waiting }),
      element("td", { className: "muted", textContent: finding.next }));
    row.dataset.state = finding.state;
    row.dataset.culprit = finding.culprit;
    row.dataset.cause = finding.cause;
    row.addEventListener("click", () => {
      const op = ops.indexOf(finding.trace);
      if (op >= 0) select(op, { show: true });
    });
    return row;
  }));
  const button = byId("all-findings");
  button.hidden = all || findings.length <= FEW;
  button.textContent = `Show all ${findings.length} verdicts`;
}

// A row for each rank, if one of them is late in every step.
function drawStragglers(all = false) {
  byId("stragglers").hidden = !chronic.length;
  const shown = !chronic.length ? [] : all ? raw.stragglers : raw.stragglers.slice(0, FEW);
  byId("stragglers").tBodies[0].replaceChildren(...shown.map((straggler) => {
    const place = straggler.pid === null ? "" : ` ${straggler.host} · pid ${straggler.pid}`;
    const row = element("tr", {},
      element("td", {}, element("span", { className: straggler.chronic ? "rank" : "", textContent: `rank ${straggler.rank}` }), element("span", { className: "muted", textContent: place })),
      element("td", { textContent: straggler.communicator }),
      element("td", { className: "number", textContent: `${count(straggler.last)} of ${count(straggler.operations)}` }),
      element("td", { className: "number", textContent: duration(straggler.median) }),
      element("td", { className: "number", textContent: duration(straggler.p99) }),
      element("td", { className: "number", textContent: rankTime(straggler.lost) }),
      element("td", { className: "number", textContent: shareWords(straggler.share) }));
    row.dataset.rank = straggler.rank;
    row.dataset.chronic = straggler.chronic;
    return row;
  }));
  const button = byId("all-stragglers");
  button.hidden = all || !chronic.length || raw.stragglers.length <= FEW;
  button.textContent = `Show all ${raw.stragglers.length} ranks`;
}

function drawFacts() {
  const hosts = new Set(rows.map((row) => row.host)).size;
  const moved = ops.bytes.reduce((a, b) => a + b, 0);
  const facts = [
    ["operations", count(raw.seen), "operations"], ["ranks", count(rows.length), "ranks"], ["hosts", count(hosts), "hosts"],
    ["communicators", count(raw.communicators.length), "communicators"], ["late operations", count(culprits.reduce((s, c) => s + c.ops.length, 0)), "late"],
    ["in messages", size(moved), "bytes"], ["recorded", duration(ops.n ? tEnd : 0), "span"],
    ["lost events", count(raw.lost), "lost"],
  ];
  byId("facts").replaceChildren(...facts.map(([name, value, key]) => {
    const box = element("div", { className: key === "lost" && raw.lost ? "bad" : "" }, element("dt", { textContent: name }), element("dd", { textContent: value }));
    box.dataset.fact = key;
    return box;
  }));
  byId("title").textContent = document.title;
  byId("when").textContent = ops.n ? `${day(0)} ${clock(0, 0)} – ${clock(tEnd, 0)} UTC` + (raw.final ? "" : " · still recording, reload for more") : "";
  byId("foot").textContent = `Written by ringsight ${raw.version} at ${new Date(raw.written * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC. Waiting lasts from a rank’s own arrival on the device to the last rank’s; ` +
    "lag is the late rank’s arrival minus the median of the others’. Nothing on this page is loaded from a network.";
}

function drawCulprits(all = false) {
  const body = byId("culprits").tBodies[0];
  byId("culprits").hidden = !culprits.length;
  const shown = all ? culprits : culprits.slice(0, FEW), most = culprits.length ? culprits[0].waited : 1;
  body.replaceChildren(...shown.map((c) => {
    const name = element("button", { type: "button", textContent: c.name, className: "rank", title: "Show only these operations" });
    const place = c.row >= 0 ? ` ${rows[c.row].host} · pid ${rows[c.row].pid}` : " not watched here";
    const strip = element("canvas", { role: "img", "aria-label": `When ${c.name} was late` });
    const [first, last] = [c.ops[0], c.ops[c.ops.length - 1]];
    const row = element("tr", {},
      element("td", {}, name, element("span", { className: "muted", textContent: place })),
      element("td", { className: "number bar", textContent: rankTime(c.waited) }, element("i", { style: { width: `${Math.max(1, c.waited / most * 160)}px` } })),
      element("td", { className: "number", textContent: count(c.ops.length) }),
      element("td", { className: "number", textContent: duration(c.median) }),
      element("td", { className: "number", textContent: duration(c.worst) }),
      element("td", { className: "muted", textContent: `${clock(ops.last[first], 1)} – ${clock(ops.last[last], 1)}` }),
      element("td", { className: "when" }, strip));
    row.dataset.rank = c.rank;
    row.dataset.operations = c.ops.length;
    row.dataset.waited = Math.round(c.waited);
    row.dataset.worst = c.worst;
    row.addEventListener("click", () => {
      byId("query").value = `culprit:${c.rank}`;
      setQuery(byId("query").value);
      select(c.ops.reduce((a, b) => ops.lag[b] > ops.lag[a] ? b : a), { show: true });
      byId("timeline").scrollIntoView({ block: "nearest" });
    });
    c.strip = strip;
    return row;
  }));
  const button = byId("all-culprits");
  button.hidden = all || culprits.length <= FEW;
  button.textContent = `Show all ${culprits.length} late ranks`;
  drawStrips();
}

// Each late operation at its moment, as tall as its lag is long.
function drawStrips() {
  for (const c of culprits) {
    if (!c.strip?.isConnected || !c.strip.clientWidth) continue;
    const width = c.strip.clientWidth, height = 18, context = fitCanvas(c.strip, width, height);
    context.fillStyle = theme.line;
    context.fillRect(0, height - 1, width, 1);
    context.fillStyle = theme.late;
    for (const op of c.ops) {
      const tall = Math.max(2, ops.lag[op] / culprits.reduce((m, o) => Math.max(m, o.worst), 1) * (height - 1));
      context.fillRect(ops.last[op] / tEnd * (width - 2), height - tall, 2, tall);
    }
  }
}

// On paper there is no table to scroll: the worst operations are printed instead.
function drawPrintList() {
  const worst = culprits.flatMap((c) => c.ops).sort((a, b) => ops.waited[b] - ops.waited[a]).slice(0, 40);
  if (!worst.length) return;
  const columns = COLUMNS.filter((column) => column.key !== "bandwidth");
  byId("print-list").replaceChildren(element("h3", { textContent: `The ${plural(worst.length, "late operation")} that cost most` }),
    element("table", {}, element("tr", {}, ...columns.map((column) => element("th", { textContent: column.title }))),
      ...worst.map((op) => element("tr", {}, ...columns.map((column) => element("td", { textContent: column.text(op) }))))));
}
