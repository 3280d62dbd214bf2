// Draws the parts that are no charts: texts, tiles, tables, bars and intervals. PARTS maps a part's kind to the function
// that draws it: (part, box, page) -> {redraw(), destroy()} or nothing. A later script may add kinds.
"use strict";

/** Column and direction by which tables are sorted, by caption. */
const sorts = new Map();

const PARTS = {
  text(part, box) {
    box.append(element("p", { class: part.tone }, part.text));
  },

  heading(part, box) {
    box.append(element("h3", {}, part.text));
  },

  tiles(part, box) {
    box.append(element("dl", { class: "tiles" }, part.items.map((item) =>
      element("div", {}, element("dt", {}, item.name), element("dd", {}, element("b", {}, item.value), " ", element("span", {}, item.note))))));
  },

  details(part, box) {
    box.append(element("details", {}, element("summary", {}, part.summary), element("pre", { tabindex: 0 }, part.text)));
  },

  table(part, box) {
    const body = element("tbody");
    const show = (rows) => body.replaceChildren(...rows.map((row) => element("tr", {},
      row.map((cell, place) => (place ? element("td", {}, cell) : element("th", { scope: "row" }, cell))))));
    const heads = part.head.map((name, place) => {
      const head = element("th", { scope: "col", "aria-sort": "none" }, button(name, "sort by this column", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        sorts.set(part.caption, { place, down });
        show(sortedRows(part.rows, place, down));
      }));
      return head;
    });
    const sort = sorts.get(part.caption); // of before the table was drawn anew
    if (sort && sort.place < heads.length) {
      heads[sort.place].setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      show(sortedRows(part.rows, sort.place, sort.down));
    } else show(part.rows);
    box.append(element("p", { class: "soft" }, part.caption), element("div", { class: "scroll", tabindex: 0 },
      element("table", { "aria-label": part.caption }, element("thead", {}, element("tr", {}, heads)), body)));
  },

  bars(part, box, page) {
    const hidden = page.hiddenSeries(part.id);
    const rows = element("div", { class: "bars" });
    const legend = element("ul", { class: "legend" });
    const draw = () => {
      const shown = part.series.filter((_, place) => !hidden.has(place));
      const whole = part.groups.map((_, group) => shown.map((one) => one.values[group] ?? 0));
      const most = Math.max(1e-9, ...whole.map((values) => (part.stacked ? values.reduce((a, b) => a + b, 0) : Math.max(0, ...values))));
      const full = part.unit === "share" ? 1 : most;
      rows.replaceChildren(...part.groups.map((group, place) => barRow(part, group, place, shown, full)));
      drawLegend(legend, part.series.map((one) => ({ label: one.label, colour: `s${one.colour}` })), hidden, draw);
      legend.hidden = part.series.length < 2;
    };
    draw();
    box.append(element("figure", {}, element("figcaption", {}, part.title), legend, rows));
  },

  intervals(part, box, page) {
    const hidden = page.hiddenSeries(part.id);
    const names = [...new Map(part.rows.flatMap((row) => row.values).map((one) => [one.series, one.colour]))];
    const rows = element("div", { class: "intervals" });
    const legend = element("ul", { class: "legend" });
    const draw = () => {
      rows.replaceChildren(...part.rows.map((row) => element("div", { class: "row" }, element("span", { class: "name" }, row.label),
        element("div", { class: "track" }, row.values.filter((one) => !hidden.has(names.findIndex(([name]) => name === one.series)))
          .map((one) => interval(one, row.label))))), element("div", { class: "row scale", "aria-hidden": true }, element("span", { class: "name" }),
        element("div", { class: "track" }, ["0%", "50%", "100%"].map((words) => element("span", {}, words)))));
      drawLegend(legend, names.map(([label, colour]) => ({ label, colour: `s${colour}`, points: true })), hidden, draw);
    };
    draw();
    box.append(element("figure", {}, element("figcaption", {}, part.title), legend, rows));
  },
};

/** Rows by a column: numbers by value, then, either way, what is none, by the alphabet. */
function sortedRows(rows, place, down) {
  const sign = down ? -1 : 1;
  const number = (row) => parseFloat(String(row[place]).replace(/[,\u00a0]/g, ""));
  return [...rows].sort((a, b) => {
    const [x, y] = [number(a), number(b)];
    if (Number.isNaN(x) && Number.isNaN(y)) return sign * String(a[place]).localeCompare(String(b[place]));
    return Number.isNaN(x) - Number.isNaN(y) || sign * (x === y ? 0 : x - y);
  });
}

/** Switches of a figure's series. hidden: set of the places that are off, which a click changes before `changed`. */
function drawLegend(list, entries, hidden, changed) {
  const focused = [...list.children].findIndex((item) => item.contains(document.activeElement));
  list.replaceChildren(...entries.map((entry, place) => {
    const key = element("i", { class: `swatch ${entry.points ? "point" : ""} ${entry.dash ? `dash${entry.dash}` : ""}` });
    key.style.setProperty("--c", `var(--${entry.colour})`);
    const toggle = (event) => {
      if (event.shiftKey || event.altKey) { // only this one, or all again
        const only = hidden.size === entries.length - 1 && !hidden.has(place);
        hidden.clear();
        if (!only) entries.forEach((_, other) => other !== place && hidden.add(other));
      } else if (!hidden.delete(place)) hidden.add(place);
      changed();
    };
    const item = button("", "show or hide; with Shift only this one", toggle, !hidden.has(place));
    item.append(key, entry.label);
    return element("li", {}, item);
  }));
  if (focused >= 0) list.children[focused]?.firstChild.focus();
}

function barRow(part, group, place, shown, full) {
  const words = (value) => (part.unit === "share" ? percentage(value) : lengthOfTime(value));
  const bars = shown.filter((one) => one.values[place] !== null).map((one) => {
    const bar = element("div", { class: "bar", tabindex: 0, "aria-label": `${group}, ${one.label}: ${words(one.values[place])}` });
    bar.style.width = `${100 * Math.min(1, one.values[place] / full)}%`;
    bar.style.background = `var(--s${one.colour})`;
    hover(bar, () => [[`s${one.colour}`, `${one.label}: ${words(one.values[place])}`]]);
    return part.stacked ? bar : element("div", { class: "one" }, bar, element("span", {}, words(one.values[place])));
  });
  const sum = shown.reduce((total, one) => total + (one.values[place] ?? 0), 0);
  const end = part.stacked && part.unit !== "share" ? element("span", { class: "sum" }, words(sum)) : null;
  return element("div", { class: "row" }, element("span", { class: "name" }, group),
    element("div", { class: part.stacked ? "track stacked" : "track" }, bars), end);
}

function interval(one, label) {
  const words = `${one.series}: ${percentage(one.rate)} [${Math.round(100 * one.low)}, ${Math.round(100 * one.high)}], ${one.note}`;
  const node = element("div", { class: "interval", tabindex: 0, "aria-label": `${label}, ${words}` }, element("i"));
  node.style.setProperty("--c", `var(--s${one.colour})`);
  node.style.left = `${100 * one.low}%`;
  node.style.width = `${100 * (one.high - one.low)}%`;
  node.firstChild.style.left = `${(100 * (one.rate - one.low)) / Math.max(1e-9, one.high - one.low)}%`;
  hover(node, () => [label, [`s${one.colour}`, words]]);
  return node;
}

/** Show the lines at the pointer, or below the node when the keyboard has come to it. */
function hover(node, lines) {
  node.addEventListener("pointermove", (event) => tooltip.show(event.clientX, event.clientY, lines()));
  node.addEventListener("pointerleave", () => tooltip.hide());
  node.addEventListener("focus", () => {
    const at = node.getBoundingClientRect();
    tooltip.show(at.left, at.bottom, lines());
  });
  node.addEventListener("blur", () => tooltip.hide());
}
