// Draws charts with uPlot: curves with bands, points with intervals, steps, bars and stacked areas, over the axis that
// the page is switched to. A drag, Ctrl and the wheel, + and - zoom; a double click or 0 shows all.
"use strict";

const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const MARK_COLOURS = { fault: "s5", alarm: "s1", change: "soft" };
const MARK_NAMES = { fault: "a station was lost", alarm: "alarm", change: "settings were changed" };

PARTS.chart = function (part, box, page) {
  const hidden = page.hiddenSeries(part.id);
  const legend = element("ul", { class: "legend" });
  const holder = element("div", { class: "plot", tabindex: 0, role: "img", "aria-label": part.title });
  const tools = element("span", { class: "tools" });
  const figure = element("figure", { class: part.size }, element("figcaption", {}, part.title, tools), legend, holder);
  box.append(figure);
  const axis = page.axis in part.x ? page.axis : Object.keys(part.x)[0];
  const tones = [...new Set(part.marks.map((mark) => mark.tone))];
  const entries = part.series.map((one) => ({ label: one.label, colour: `s${one.colour}`, dash: one.style === "line" ? one.dash : 0, points: one.style === "points" }))
    .concat(tones.map((tone) => ({ label: MARK_NAMES[tone], colour: MARK_COLOURS[tone], dash: 2 })));
  let plot = null, view = page.zooms.get(part.id + axis) ?? null, cursor = -1;

  function draw() {
    plot?.destroy();
    const shown = part.series.filter((one, place) => !hidden.has(place) && one.x[axis]?.length);
    const marks = part.marks.filter((mark) => mark.x[axis] != null && !hidden.has(part.series.length + tones.indexOf(mark.tone)));
    drawLegend(legend, entries, hidden, draw);
    legend.hidden = entries.length < 2;
    const content = chartContent(shown, axis);
    const extent = chartExtent(part.series, axis, marks);
    plot = new uPlot(chartOptions(part, axis, holder, content, shown, marks, () => view ?? extent), content.data, holder);
    plot.extent = extent;
    plot.over.addEventListener("pointermove", (event) => hint(event.clientX, event.clientY));
    plot.over.addEventListener("pointerleave", () => tooltip.hide());
    plot.hint = hint;
    function hint(clientX, clientY) {
      const at = plot.posToVal(clientX - plot.over.getBoundingClientRect().left, "x");
      tooltip.show(clientX, clientY, chartLines(part, axis, shown, marks, at, plot));
    }
  }

  function zoom(range) {
    const [first, last] = plot.extent;
    view = range && range[1] - range[0] < last - first ? range : null;
    view ? page.zooms.set(part.id + axis, view) : page.zooms.delete(part.id + axis);
    const [min, max] = view ?? plot.extent;
    plot.setScale("x", { min, max });
  }
  figure.addEventListener("zoomed", (event) => zoom(event.detail));
  const scaled = (factor, centre = null) => {
    const { min, max } = plot.scales.x;
    const middle = centre ?? (min + max) / 2;
    zoom([Math.max(plot.extent[0], middle - (middle - min) * factor), Math.min(plot.extent[1], middle + (max - middle) * factor)]);
  };
  tools.append(button("+", "zoom in", () => scaled(0.5)), button("−", "zoom out", () => scaled(2)), button("⟲", "show all", () => zoom(null)));
  holder.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    scaled(1.2 ** (event.deltaY / 60), plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x"));
  }, { passive: false });
  holder.addEventListener("keydown", (event) => {
    const { min, max } = plot.scales.x;
    if (event.key === "+" || event.key === "=") scaled(0.5);
    else if (event.key === "-") scaled(2);
    else if (event.key === "0") zoom(null);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const step = event.key === "ArrowRight" ? 1 : -1;
      if (event.shiftKey) zoom([min + 0.2 * step * (max - min), max + 0.2 * step * (max - min)]);
      else {
        const xs = plot.data[0];
        cursor = Math.max(0, Math.min(xs.length - 1, (cursor < 0 ? plot.valToIdx((min + max) / 2) : cursor) + step));
        const over = plot.over.getBoundingClientRect(), left = plot.valToPos(xs[cursor], "x");
        plot.setCursor({ left, top: over.height / 2 }, false);
        plot.hint(over.left + left, over.top + over.height / 3);
      }
    } else return;
    event.preventDefault();
  });
  holder.addEventListener("blur", () => tooltip.hide());
  draw();
  return { redraw: draw, destroy: () => plot.destroy() };
};

/** Columns of all shown series over one x, and which of them each series has. */
function chartContent(shown, axis) {
  const tables = [], columns = [];
  let below = null, next = 1;
  const ordered = shown.map((one) => {
    if (one.style !== "area") return { one, y: one.y };
    below = one.y.map((value, place) => (value ?? 0) + (below ? below[place] : 0));
    return { one, y: below };
  });
  // Areas are filled down to 0, so the highest is drawn first.
  const areas = ordered.filter(({ one }) => one.style === "area").reverse();
  for (const { one, y } of [...areas, ...ordered.filter(({ one }) => one.style !== "area")]) {
    const edges = one.low.length === one.y.length && one.y.length > 0;
    tables.push(edges ? [one.x[axis], y, one.low, one.high] : [one.x[axis], y]);
    columns.push({ one, y: next, low: edges ? next + 1 : 0, high: edges ? next + 2 : 0 });
    next += edges ? 3 : 1;
  }
  const data = tables.length ? uPlot.join(tables) : [[0, 1]];
  return { data, columns };
}

function chartExtent(all, axis, marks) {
  const ends = all.flatMap((one) => (one.x[axis]?.length ? [one.x[axis][0], one.x[axis][one.x[axis].length - 1]] : []))
    .concat(marks.map((mark) => mark.x[axis]));
  let [first, last] = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
  const discrete = all.some((one) => one.style === "bars");
  const margin = discrete ? 0.7 : 0.02 * (last - first || 1);
  return [first - margin, last + margin];
}

function chartOptions(part, axis, holder, content, shown, marks, range) {
  const ink = colourOf("soft"), rule = { stroke: colourOf("rule"), width: 1 };
  const font = "12px system-ui, sans-serif";
  const time = axis === "time", wide = part.size === "wide", percent = part.y.percent;
  const width = Math.max(240, holder.clientWidth);
  const series = [{}], bands = [];
  for (const { one, low, high } of content.columns) {
    const colour = colourOf(`s${one.colour}`), none = { show: false };
    const line = one.style === "line" || one.style === "area" || one.style === "steps";
    const lonely = one.style === "line" && one.y.length < 3;
    series.push({
      stroke: colour, width: one.style === "area" ? 0.5 : 2, dash: one.style === "area" ? [] : DASHES[one.dash],
      fill: one.style === "area" ? colour : undefined, points: lonely ? { show: true, size: 6 } : none,
      paths: line ? (one.style === "steps" ? uPlot.paths.stepped({ align: -1 }) : undefined) : () => null,
    });
    if (!low) continue;
    // An interval may reach far beyond the curves, as Student's of two seeds does, so it does not scale the axis.
    const edge = { points: none, paths: line ? undefined : () => null, width: 0, auto: false };
    series.push(edge, { ...edge });
    if (line) bands.push({ series: [high, low], fill: `color-mix(in srgb, ${colour} 18%, transparent)` });
  }
  return {
    width, height: wide ? (width < 500 ? 260 : 320) : 220, series, bands, legend: { show: false }, padding: [14, 10, 0, 0],
    scales: {
      x: { time: false, range: () => range() },
      y: { range: (_, low, high) => chartHeight(part.y, low, high) },
    },
    axes: [
      { stroke: ink, grid: rule, ticks: rule, font, size: 34, labelSize: 18, labelFont: font, label: part.x[axis], space: 64,
        ...(time ? { incrs: TIME_STEPS, values: (_, ticks, __, ___, step) => ticks.map((tick) => clock(tick, step)) }
          : { values: (_, ticks) => ticks.map(shortNumber) }),
        ...(time || axis === "transitions" ? {} : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }) },
      { stroke: ink, grid: rule, ticks: rule, font, size: 52, labelSize: 18, labelFont: font, label: part.y.label,
        values: (_, ticks) => ticks.map(percent ? percentage : shortNumber) },
    ],
    cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 7 }, bind: { dblclick: () => () => holder.dispatchEvent(new CustomEvent("zoomed", { detail: null, bubbles: true })) } },
    hooks: {
      setSelect: [(plot) => {
        const { left, width: wide_ } = plot.select;
        if (wide_ < 4) return;
        const ends = [plot.posToVal(left, "x"), plot.posToVal(left + wide_, "x")];
        plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        holder.dispatchEvent(new CustomEvent("zoomed", { detail: ends, bubbles: true }));
      }],
      draw: [(plot) => drawOver(plot, content, marks, axis)],
    },
  };
}

function chartHeight(y, low, high) {
  let first = Math.min(low ?? 0, y.low ?? Infinity), last = Math.max(high ?? 0, y.high ?? -Infinity);
  if (first === last) last = first + (Math.abs(first) || 1);
  const margin = 0.05 * (last - first);
  if (!(y.low !== null && first >= y.low)) first -= margin;
  if (!(y.high !== null && last <= y.high && y.percent)) last += margin;
  return [first, last];
}

/** What uPlot has no paths for: marks, bars, and points with intervals, whose shape tells the series' dash. */
function drawOver(plot, content, marks, axis) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top - 8 * ratio, bbox.width, bbox.height + 8 * ratio);
  ctx.clip();
  for (const mark of marks) {
    const x = plot.valToPos(mark.x[axis], "x", true);
    ctx.strokeStyle = ctx.fillStyle = colourOf(MARK_COLOURS[mark.tone]);
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash((mark.tone === "fault" ? [3, 3] : [6, 3]).map((dash) => dash * ratio));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x - 4 * ratio, bbox.top - 7 * ratio);
    ctx.lineTo(x + 4 * ratio, bbox.top - 7 * ratio);
    ctx.lineTo(x, bbox.top);
    ctx.fill();
  }
  ctx.setLineDash([]);
  const bars = content.columns.filter(({ one }) => one.style === "bars");
  bars.forEach(({ one }, place) => drawBars(plot, one, axis, place, bars.length));
  for (const { one } of content.columns) if (one.style === "points") drawPoints(plot, one, axis);
  ctx.restore();
}

function drawBars(plot, one, axis, place, count) {
  const { ctx } = plot, xs = one.x[axis];
  const step = xs.slice(1).reduce((least, x, before) => Math.min(least, x - xs[before]), 1);
  ctx.fillStyle = colourOf(`s${one.colour}`);
  xs.forEach((x, at) => {
    const left = plot.valToPos(x + step * (-0.4 + (0.8 * place) / count), "x", true);
    const right = plot.valToPos(x + step * (-0.4 + (0.8 * (place + 1)) / count), "x", true);
    const top = plot.valToPos(one.y[at], "y", true), bottom = plot.valToPos(0, "y", true);
    ctx.fillRect(left, top, Math.max(1, right - left - 1), bottom - top);
  });
}

function drawPoints(plot, one, axis) {
  const { ctx } = plot, ratio = devicePixelRatio, size = 5 * ratio;
  ctx.fillStyle = ctx.strokeStyle = colourOf(`s${one.colour}`);
  ctx.lineWidth = 2 * ratio;
  one.x[axis].forEach((value, place) => {
    if (one.y[place] === null) return;
    const x = plot.valToPos(value, "x", true) + (one.dash - 1) * 3 * ratio, y = plot.valToPos(one.y[place], "y", true);
    ctx.beginPath();
    if (one.low.length) {
      ctx.moveTo(x, plot.valToPos(one.low[place], "y", true));
      ctx.lineTo(x, plot.valToPos(one.high[place], "y", true));
      ctx.stroke();
    }
    ctx.beginPath();
    if (one.dash === 0) ctx.arc(x, y, size, 0, 2 * Math.PI);
    else if (one.dash === 1) ctx.rect(x - size * 0.9, y - size * 0.9, 1.8 * size, 1.8 * size);
    else for (const [dx, dy] of one.dash === 2 ? [[0, -1.2], [1.1, 0.9], [-1.1, 0.9]] : [[0, -1.3], [1.1, 0], [0, 1.3], [-1.1, 0]]) ctx.lineTo(x + dx * size, y + dy * size);
    ctx.closePath();
    ctx.fill();
  });
}

/** Lines of the small window at x: each series' nearest point, and marks close by. */
function chartLines(part, axis, shown, marks, at, plot) {
  const words = part.y.percent ? percentage : shortNumber;
  const reach = plot.posToVal(8, "x") - plot.posToVal(0, "x");
  const lines = [axis === "time" ? clock(at) : axis === "transitions" ? `${shortNumber(at)} transitions` : `${part.x[axis]}: ${Math.round(at)}`];
  const { min, max } = plot.scales.x;
  for (const one of shown) {
    const place = nearest(one.x[axis], at), x = one.x[axis][place];
    if (one.y[place] === null || x < min || x > max || (one.style !== "line" && one.style !== "area" && one.style !== "steps" && Math.abs(x - at) > Math.max(reach, one.style === "bars" ? 0.5 : 0))) continue;
    const range = one.low.length ? ` [${words(one.low[place])}, ${words(one.high[place])}]` : "";
    lines.push([`s${one.colour}`, `${one.label}: ${words(one.y[place])}${range}`]);
  }
  for (const mark of marks) if (Math.abs(mark.x[axis] - at) <= reach) lines.push([MARK_COLOURS[mark.tone], mark.label]);
  return lines;
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}
