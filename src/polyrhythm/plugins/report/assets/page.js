// Builds the page from its data: header with switches, contents, sections of parts. showPage(data) draws a page, or
// brings the one that is there up to date.
"use strict";

const page = {
  axis: "transitions",
  zooms: new Map(), // of charts and timelines by id, kept when a section is drawn anew
  hidden: new Map(),
  sections: new Map(), // id -> {json, node, drawn: [{redraw, destroy, ready}]}
  hiddenSeries(id) {
    if (!this.hidden.has(id)) this.hidden.set(id, new Set());
    return this.hidden.get(id);
  },
};

const THEMES = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" };

function showPage(data) {
  const main = document.getElementById("page");
  if (!main.firstChild) main.append(header(data), element("nav", { "aria-label": "Sections" }));
  document.querySelector("h1").textContent = data.title;
  document.getElementById("axes").hidden = !hasBothAxes(data);
  const wanted = new Set(data.sections.map((section) => section.id));
  for (const [id, old] of page.sections) if (!wanted.has(id)) removeSection(id, old);
  let before = main.querySelector("nav");
  for (const section of data.sections) {
    const json = JSON.stringify(section), old = page.sections.get(section.id);
    if (old?.json !== json) page.sections.set(section.id, drawSection(section, json, old, before));
    before = page.sections.get(section.id).node;
  }
  main.querySelector("nav").replaceChildren(...data.sections.filter((section) => section.heading)
    .map((section) => element("a", { href: `#${section.id}` }, section.heading)));
  page.data = data;
  return Promise.all([...page.sections.values()].flatMap((section) => section.drawn.map((one) => one.ready)));
}

function drawSection(section, json, old, before) {
  const restore = old ? used(old.node) : null;
  old?.drawn.forEach((one) => one.destroy?.());
  const node = element("section", { id: section.id }, section.heading ? element("h2", {}, section.heading) : null);
  if (old) old.node.replaceWith(node);
  else before.after(node);
  const box = element("div", { class: "parts" });
  node.append(box);
  const drawn = section.parts.map((part) => {
    const draw = PARTS[part.kind];
    return (draw ? draw(part, box, page) : null) ?? {};
  });
  restore?.(node);
  return { json, node, drawn };
}

/** What the reader does in a section: the focus, details that are open, videos that play. Returns the function that
    brings it to the section's new node. */
function used(node) {
  const all = (where, selector) => [...where.querySelectorAll(selector)];
  const focusable = "button, input, select, summary, [tabindex]";
  const focus = document.activeElement, place = all(node, focusable).indexOf(focus);
  const text = focus?.type === "search" ? [focus.selectionStart, focus.selectionEnd] : null;
  const open = new Set(all(node, "details").filter((one) => one.open).map((one) => one.firstChild.textContent));
  const played = new Map(all(node, "video").filter((one) => one.currentTime).map((one) => [one.src, [one.currentTime, one.paused]]));
  return (fresh) => {
    for (const one of all(fresh, "details")) one.open ||= open.has(one.firstChild.textContent);
    for (const one of all(fresh, "video")) {
      if (!played.has(one.src)) continue;
      const [time, paused] = played.get(one.src);
      one.currentTime = time;
      if (!paused) one.play().catch(() => { /* the browser may forbid it */ });
    }
    const again = all(fresh, focusable)[place];
    if (!again || again.tagName !== focus.tagName) return;
    again.focus({ preventScroll: true });
    if (text) again.setSelectionRange(...text);
  };
}

function removeSection(id, old) {
  old.drawn.forEach((one) => one.destroy?.());
  old.node.remove();
  page.sections.delete(id);
}

/** Whether a chart has both axes; in a run that begins none has. */
function hasBothAxes(data) {
  const charts = data.sections.flatMap((section) => section.parts).filter((part) => part.kind === "chart");
  return charts.some((part) => "time" in part.x && "transitions" in part.x);
}

function header(data) {
  const axes = element("span", { class: "switch", role: "group", "aria-label": "Axis of the curves" },
    ["transitions", "time"].map((axis) => button(`over ${axis}`, "axis of all curves (x)", () => switchAxis(axis), axis === page.axis)));
  axes.id = "axes";
  const theme = button("", "colours: as the system has them, light, dark (d)", switchTheme);
  theme.id = "theme";
  const keys = element("details", { class: "keys" }, element("summary", {}, "keys"), element("p", {},
    "Drag over a figure: zoom. Double click: show all. Ctrl and wheel: zoom. With a figure focused (Tab): + − zoom, 0 all, " +
    "arrows next point or move, in the timeline u one update, s one chunk step. Anywhere: x axis of the curves, d colours, j and k next and previous section. " +
    "Legend: click shows or hides, with Shift only that one."));
  return element("header", {}, element("h1", {}, data.title), element("div", { class: "switches" }, axes, theme, keys));
}

function switchAxis(axis) {
  page.axis = axis;
  for (const other of document.querySelectorAll("#axes button")) other.setAttribute("aria-pressed", String(other.textContent === `over ${axis}`));
  for (const [id, section] of page.sections) {
    const content = page.data.sections.find((one) => one.id === id);
    if (content.parts.some((part) => part.kind === "chart")) page.sections.set(id, drawSection(content, section.json, section, null));
  }
}

function switchTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % names.length]);
  redrawAll();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = THEMES[name];
  try {
    localStorage.setItem("polyrhythm-theme", name);
  } catch { /* a file of this origin may not store anything */ }
}

function storedTheme() {
  try {
    return localStorage.getItem("polyrhythm-theme") in THEMES ? localStorage.getItem("polyrhythm-theme") : "auto";
  } catch {
    return "auto";
  }
}

function redrawAll() {
  for (const section of page.sections.values()) section.drawn.forEach((one) => one.redraw?.());
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  if (event.key === "d") switchTheme();
  else if (event.key === "x" && !document.getElementById("axes").hidden) switchAxis(page.axis === "time" ? "transitions" : "time");
  else if (event.key === "j" || event.key === "k") {
    const tops = [...page.sections.values()].map((section) => section.node).map((node) => [node, node.getBoundingClientRect().top]);
    const next = event.key === "j" ? tops.find(([, top]) => top > 20) : tops.reverse().find(([, top]) => top < -20);
    next?.[0].scrollIntoView();
  } else if (event.key === "Escape") tooltip.hide();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

let drawnWidth = innerWidth, waiting = 0;
addEventListener("resize", () => { // on a phone the bar of addresses changes the height only
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (innerWidth !== drawnWidth) redrawAll();
    drawnWidth = innerWidth;
  }, 150);
});

document.documentElement.dataset.theme = storedTheme();
showPage(JSON.parse(document.getElementById("data").textContent)).then(() => {
  // Two frames later everything is on the screen.
  requestAnimationFrame(() => requestAnimationFrame(() => {
    document.documentElement.dataset.drawnMs = performance.now().toFixed(0);
  }));
});
setTheme(document.documentElement.dataset.theme);
