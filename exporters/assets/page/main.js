// Puts the page together.

function drawShown() {
  byId("shown").textContent = state.shown === ops.n ? plural(ops.n, "operation") : `${count(state.shown)} of ${plural(ops.n, "operation")}`;
  byId("late-only").setAttribute("aria-pressed", String(state.lateOnly));
  for (const button of byId("types").children) button.setAttribute("aria-pressed", String(!state.hidden.has(Number(button.dataset.name))));
  for (const id of ["previous-late", "next-late", "late-only"]) byId(id).disabled = !culprits.length && !state.lateOnly;
}

function buildTools() {
  const used = new Array(raw.names.length).fill(0);
  for (let i = 0; i < ops.n; i++) used[ops.name[i]]++;
  raw.names.forEach((name, i) => {
    const mark = element("i", { className: "swatch" });
    const button = element("button", { type: "button", title: `${plural(used[i], "operation")}; click to hide or show` }, mark, name);
    button.dataset.name = i;
    button.addEventListener("click", () => {
      if (!state.hidden.delete(i)) state.hidden.add(i);
      applyFilter();
    });
    byId("types").append(button);
  });
  let typing = 0;
  byId("query").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => setQuery(byId("query").value), 120);
  });
  byId("query").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    clearTimeout(typing);
    setQuery(byId("query").value);
    if (table.order.length) select(table.order[0], { show: true });
  });
  const click = (id, action) => byId(id).addEventListener("click", action);
  click("late-only", () => {
    state.lateOnly = !state.lateOnly;
    applyFilter();
  });
  click("previous-late", () => stepLate(-1));
  click("next-late", () => stepLate(1));
  click("zoom-in", () => zoom(0.5));
  click("zoom-out", () => zoom(2));
  click("zoom-fit", fitAll);
  click("all-culprits", () => drawCulprits(true));
  click("all-findings", () => drawFindings(true));
  click("all-stragglers", () => drawStragglers(true));
}

function paintTypes() {
  for (const button of byId("types").children) button.firstChild.style.background = typeColour(raw.names[Number(button.dataset.name)]);
}

function tell() {
  const { dataset } = document.documentElement;
  Object.assign(dataset, { operations: ops.n, parts: parts.n, shown: state.shown, culprits: culprits.length, findings: findings.length, stragglers: chronic.length, from: Math.round(state.from), to: Math.round(state.to) });
  dataset.selected = state.selected >= 0 ? ops.trace(state.selected) : "";
}

function start() {
  const began = performance.now();
  state.sort = usualSort();
  readTheme();
  layout();
  buildTools();
  buildTable();
  listenRows();
  listenOverview();
  listenKeys();
  paintTypes();
  drawFacts();
  drawVerdict();
  drawFindings();
  drawStragglers();
  drawCulprits();
  on("view", redraw);
  on("view", writeAddress);
  on("view", tell);
  on("filter", () => {
    sortTable();
    byId("list").scrollTop = 0;
    drawTable();
    drawShown();
    redraw();
    writeAddress();
    tell();
  });
  on("selection", () => {
    showInTable(state.selected);
    if (state.selected >= 0 && ops.culprit[state.selected] >= 0) showRow(ops.culprit[state.selected]);
    drawTable();
    drawDetails();
    redraw();
    writeAddress();
    tell();
  });
  readAddress();
  drawPrintList();
  drawNow();
  if (culprits.length && culprits[0].row >= 0 && state.selected < 0) showRow(culprits[0].row);
  document.documentElement.dataset.renderMs = (performance.now() - began).toFixed(1);

  byId("scroller").addEventListener("scroll", redraw, { passive: true });
  new ResizeObserver(() => {
    layout();
    redraw();
    drawStrips();
    drawTable();
  }).observe(document.body);
  const repaint = () => {
    readTheme();
    layout();
    timeline.hatches.clear();
    paintTypes();
    drawStrips();
    drawTable();
    drawDetails();
    drawNow();
  };
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", repaint);
  addEventListener("hashchange", readAddress);
  document.documentElement.dataset.ready = "1";
}

start();
