// Draws the timeline of the stations on a canvas, up to some 10^6 bars. Of each lane the visible bars are found by binary
// search; bars narrower than a pixel are added up per column of pixels, which then shows the share of each kind.
"use strict";

const ROW = { station: 22, slot: 16, gap: 5, top: 8, axis: 26, overview: 16 };

PARTS.timeline = function (part, box, page) {
  const tools = element("div", { class: "timeline-tools" }), legend = element("ul", { class: "legend" });
  const canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": "Timeline of the stations; plus and minus zoom, arrows move, u shows one update, s one chunk step" });
  const spacer = element("div"), scroller = element("div", { class: "timeline" }, canvas, spacer);
  box.append(element("figure", {}, tools, legend, scroller));
  const timeline = new Timeline(part, page, canvas, scroller, spacer, legend, tools);
  return { ready: timeline.load(), redraw: () => timeline.redraw(), destroy: () => timeline.destroy() };
};

class Timeline {
  constructor(part, page, canvas, scroller, spacer, legend, tools) {
    Object.assign(this, { part, page, canvas, scroller, spacer, legend });
    this.hidden = page.hiddenSeries(part.id);
    this.view = page.zooms.get(part.id) ?? [part.first, part.last];
    this.open = page.hiddenSeries(`${part.id} open`); // stations whose slots are shown
    this.output = element("output");
    tools.append(button("+", "zoom in (+)", () => this.scale(0.5)), button("−", "zoom out (−)", () => this.scale(2)),
      button("whole run", "show all (0)", () => this.show(part.first, part.last)), button("one update", "the update in the middle (u)", () => this.showUpdate()),
      button("one chunk step", "the chunk step in the middle (s)", () => this.showStep()),
      button("slots", "open or close all simulators", () => this.toggleAll()), this.output);
    this.listen();
  }

  async load() {
    this.lanes = await unpackBars(this.part);
    const stations = new Map();
    for (const lane of this.lanes) {
      const key = `${lane.role}/${lane.station}`;
      if (!stations.has(key)) stations.set(key, { label: lane.station, key, lanes: [], slots: lane.role === "slots", idles: lane.idles });
      stations.get(key).lanes.push(lane);
    }
    this.stations = [...stations.values()];
    if (this.stations.length <= 3 && this.lanes.length <= 16) this.stations.forEach((one) => this.open.add(one.key));
    this.redraw();
  }

  rows() {
    return this.stations.flatMap((station) => [station, ...(station.slots && this.open.has(station.key)
      ? station.lanes.map((lane) => ({ label: `slot ${lane.name.slice(lane.station.length + 1)}`, lanes: [lane], slot: true, station })) : [])]);
  }

  redraw() {
    if (!this.lanes) return;
    const { part } = this;
    const entries = part.kinds.map((kind) => ({ label: kind.label, colour: `s${kind.colour}` }));
    drawLegend(this.legend, entries, this.hidden, () => this.redraw());
    [...this.legend.children].forEach((item, place) => { item.hidden = !part.kinds[place].used; });
    this.colours = part.kinds.map((kind) => colourOf(`s${kind.colour}`));
    this.look = Object.fromEntries(["page", "ink", "soft", "rule", "lane", "faint", "s0", "s1", "s5"].map((name) => [name, colourOf(name)]));
    this.width = this.scroller.clientWidth;
    this.left = this.width < 560 ? 76 : 132;
    this.right = this.width < 560 ? 34 : 46;
    this.shown = this.rows();
    let y = ROW.top;
    for (const row of this.shown) {
      Object.assign(row, { y, height: row.slot ? ROW.slot : ROW.station });
      y += row.height + ROW.gap;
    }
    this.content = y;
    const total = y + ROW.axis + ROW.overview;
    this.height = Math.min(total, Math.max(240, Math.round(innerHeight * 0.75) - 2));
    this.spacer.style.height = `${total - this.height}px`;
    const ratio = devicePixelRatio;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.hatch = hatching(this.canvas.getContext("2d"), this.look, ratio);
    this.draw();
  }

  /** Draw in the next frame, however often it is asked for until then. */
  drawSoon() {
    if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); });
  }

  get plot() { return this.width - this.left - this.right; }
  x(time) { return this.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.plot; }
  time(x) { return this.view[0] + ((x - this.left) / this.plot) * (this.view[1] - this.view[0]); }

  draw() {
    const context = this.canvas.getContext("2d");
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.fillStyle = this.look.page;
    context.fillRect(0, 0, this.width, this.height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const bottom = this.height - ROW.axis - ROW.overview, offset = this.scroller.scrollTop;
    context.save();
    context.beginPath();
    context.rect(0, 0, this.width, bottom);
    context.clip();
    context.translate(0, -offset);
    this.ticks(context, offset, offset + bottom);
    for (const row of this.shown) if (row.y + row.height >= offset && row.y <= offset + bottom) this.drawRow(context, row);
    context.restore();
    this.drawMarks(context, bottom);
    this.drawAxis(context, bottom);
    if (this.selected) {
      context.fillStyle = this.look.s0;
      context.globalAlpha = 0.2;
      context.fillRect(Math.min(...this.selected), 0, Math.abs(this.selected[1] - this.selected[0]), bottom);
      context.globalAlpha = 1;
    }
    const [lo, hi] = this.view;
    this.output.textContent = `${clock(lo, hi - lo > 20 ? 1 : (hi - lo) / 100)} to ${clock(hi, hi - lo > 20 ? 1 : (hi - lo) / 100)}, ${lengthOfTime(hi - lo)}`;
  }

  drawRow(context, row) {
    const { left, plot, part } = this, [lo, hi] = this.view, perSecond = plot / (hi - lo), kinds = part.kinds.length;
    const boxes = Array.from({ length: kinds }, () => []), columns = Math.ceil(plot);
    let sums = null, work = 0;
    for (const lane of row.lanes) {
      const { start, end, kind, number } = lane;
      for (let at = after(lane.reach, lo); at < start.length && start[at] < hi; at += 1) {
        const one = kind[at], waits = part.kinds[one].waits;
        if (waits && !row.slot) continue;
        const from = Math.max(lo, start[at]), to = Math.min(hi, end[at]);
        const together = !row.slot && row.slots ? Math.max(1, number[at]) : 1;
        work += (to - from) / together;
        if (this.hidden.has(one)) continue;
        const x = (from - lo) * perSecond, width = (to - from) * perSecond;
        if (width >= 1) boxes[one].push(x, width);
        else {
          sums ??= new Float32Array(columns * kinds);
          sums[Math.min(columns - 1, Math.floor(x)) * kinds + one] += width / together;
        }
      }
    }
    const first = row.first ??= Math.min(...row.lanes.map((lane) => lane.start[0]));
    const last = row.last ??= Math.max(...row.lanes.map((lane) => lane.reach[lane.reach.length - 1]));
    const begin = Math.max(lo, first), end = Math.min(hi, last);
    context.fillStyle = this.look.lane;
    context.fillRect(left, row.y, plot, row.height);
    if (end > begin && row.idles) { // the ground is idle time
      context.fillStyle = this.hatch;
      context.fillRect(left + (begin - lo) * perSecond, row.y, (end - begin) * perSecond, row.height);
    }
    boxes.forEach((places, one) => {
      if (!places.length) return;
      const thin = part.kinds[one].waits;
      context.fillStyle = this.colours[one];
      const top = thin ? row.y + row.height / 2 - 3 : row.y, height = thin ? 6 : row.height;
      for (let place = 0; place < places.length; place += 2) context.fillRect(left + places[place], top, places[place + 1] < 3 ? places[place + 1] : places[place + 1] - 0.5, height);
    });
    if (sums) this.drawColumns(context, row, sums, columns, kinds);
    context.fillStyle = row.slot ? this.look.soft : this.look.ink;
    context.textAlign = "right";
    const sign = row.slots ? (this.open.has(row.key) ? "▾ " : "▸ ") : "";
    const label = this.width < 560 ? row.label.replace("simulator", "sim").replace("generator", "gen") : row.label;
    context.fillText(fitted(context, sign + label, left - 8), left - 6, row.y + row.height / 2);
    row.idle = row.idles && end > begin ? Math.max(0, 1 - work / (end - begin)) : null;
    if (row.idle !== null) {
      context.fillStyle = this.look.soft;
      context.textAlign = "left";
      context.fillText(percentage(row.idle), left + plot + 5, row.y + row.height / 2);
    }
  }

  /** Columns of pixels in which bars are narrower than one: shares from below, what a slot waits for paler above. */
  drawColumns(context, row, sums, columns, kinds) {
    const heights = new Float32Array(columns);
    for (const pale of [false, true]) {
      context.globalAlpha = pale ? 0.45 : 1;
      for (let one = 0; one < kinds; one += 1) {
        if (this.part.kinds[one].waits !== pale) continue;
        context.fillStyle = this.colours[one];
        for (let column = 0; column < columns; column += 1) {
          const share = sums[column * kinds + one];
          if (share < 0.01) continue;
          const height = Math.min(share, 1 - heights[column]) * row.height;
          if (height <= 0) continue;
          context.fillRect(this.left + column, row.y + row.height * (1 - heights[column]) - height, 1, height);
          heights[column] += share;
        }
      }
    }
    context.globalAlpha = 1;
  }

  step() {
    const wanted = ((this.view[1] - this.view[0]) * (this.width < 560 ? 56 : 80)) / this.plot;
    return TIME_STEPS.find((step) => step >= wanted) ?? 86400;
  }

  ticks(context, top, bottom) {
    const step = this.step();
    context.strokeStyle = this.look.rule;
    context.beginPath();
    for (let tick = Math.ceil(this.view[0] / step) * step; tick <= this.view[1]; tick += step) {
      context.moveTo(Math.round(this.x(tick)) + 0.5, top);
      context.lineTo(Math.round(this.x(tick)) + 0.5, bottom);
    }
    context.stroke();
  }

  drawAxis(context, bottom) {
    const step = this.step();
    context.fillStyle = this.look.soft;
    context.textAlign = "center";
    for (let tick = Math.ceil(this.view[0] / step) * step; tick <= this.view[1]; tick += step) {
      const x = this.x(tick), half = context.measureText(clock(tick, step)).width / 2;
      if (x - half >= this.left - 4 && x + half <= this.left + this.plot + 4) context.fillText(clock(tick, step), x, bottom + 12);
    }
    if (this.width >= 560) {
      context.textAlign = "right";
      context.fillText("time in the run", this.left - 6, bottom + 12);
      context.textAlign = "left";
      context.fillText("idle", this.left + this.plot + 5, bottom + 12);
    }
    const top = bottom + ROW.axis, { first, last } = this.part, scale = this.plot / (last - first);
    context.fillStyle = this.look.lane;
    context.fillRect(this.left, top, this.plot, 8);
    context.fillStyle = this.look.s0;
    context.fillRect(this.left + (this.view[0] - first) * scale, top, Math.max(3, (this.view[1] - this.view[0]) * scale), 8);
    for (const mark of this.part.marks) {
      context.fillStyle = colourOf(MARK_COLOURS[mark.tone]);
      if (mark.x.time >= first && mark.x.time <= last) context.fillRect(this.left + (mark.x.time - first) * scale - 1, top - 2, 2, 12);
    }
  }

  drawMarks(context, bottom) {
    for (const mark of this.marks()) {
      const x = this.x(mark.time);
      if (x < this.left || x > this.left + this.plot) continue;
      context.strokeStyle = context.fillStyle = colourOf(mark.colour);
      context.setLineDash([4, 3]);
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(x, 7);
      context.lineTo(x, bottom);
      context.stroke();
      context.setLineDash([]);
      context.beginPath();
      context.moveTo(x - 5, 0);
      context.lineTo(x + 5, 0);
      context.lineTo(x, 8);
      context.fill();
    }
  }

  /** Faults, alarms and changes, and what the trace itself noted. */
  marks() {
    return this.part.marks.map((mark) => ({ time: mark.x.time, name: mark.label, colour: MARK_COLOURS[mark.tone] }))
      .concat(this.part.notes.map((note) => ({ ...note, colour: "soft" })));
  }

  // ------------------------------------------------------------ moving

  show(from, to) {
    const { first, last, unit } = this.part;
    const length = Math.max(10 * unit, Math.min(last - first, to - from));
    const begin = Math.max(first, Math.min(last - length, from));
    this.view = [begin, begin + length];
    this.page.zooms.set(this.part.id, this.view);
    this.drawSoon();
  }

  scale(factor, centre = (this.view[0] + this.view[1]) / 2) {
    this.show(centre - (centre - this.view[0]) * factor, centre + (this.view[1] - centre) * factor);
  }

  move(share) {
    const by = share * (this.view[1] - this.view[0]);
    this.show(this.view[0] + by, this.view[1] + by);
  }

  /** The bar of this kind that is nearest to the middle: {lane, at}. */
  nearestBar(name) {
    const wanted = this.part.kinds.findIndex((kind) => kind.name === name), centre = (this.view[0] + this.view[1]) / 2;
    let best = null;
    for (const lane of this.lanes) {
      const middle = nearest(lane.start, centre);
      for (const step of [1, -1]) {
        for (let at = middle; at >= 0 && at < lane.start.length; at += step) {
          if (lane.kind[at] !== wanted) continue;
          const far = Math.abs(lane.start[at] - centre);
          if (!best || far < best.far) best = { lane, at, far };
          break;
        }
      }
    }
    return best;
  }

  showUpdate() {
    const found = this.nearestBar("update");
    if (!found) return;
    const { lane, at } = found, same = (place) => lane.kind[place] === lane.kind[at] && lane.number[place] === lane.number[at];
    let from = at, to = at;
    while (from > 0 && (same(from - 1) || lane.kind[from - 1] !== lane.kind[at])) from -= 1;
    while (to + 1 < lane.start.length && (same(to + 1) || lane.kind[to + 1] !== lane.kind[at])) to += 1;
    // From the end of the update before to the end of this one: its samples are collected while it waits.
    this.show(from > 0 ? lane.end[from - 1] : lane.start[from], lane.end[to]);
  }

  /** From one step of a slot's simulator to the next: actions, observation, the wait for and the forward pass. */
  showStep() {
    const found = this.nearestBar("stepping");
    if (!found) return;
    const { lane, at } = found;
    let next = at + 1;
    while (next < lane.start.length && lane.kind[next] !== lane.kind[at]) next += 1;
    const end = next < lane.start.length ? lane.end[next] : lane.end[at];
    this.open.add(`${lane.role}/${lane.station}`);
    const margin = 0.15 * (end - lane.start[at]);
    this.show(lane.start[at] - margin, end + margin);
    this.redraw();
  }

  toggleAll() {
    const stations = this.stations.filter((one) => one.slots), all = stations.every((one) => this.open.has(one.key));
    stations.forEach((one) => (all ? this.open.delete(one.key) : this.open.add(one.key)));
    this.redraw();
  }

  // ------------------------------------------------------------ pointer and keys

  listen() {
    const { canvas } = this, fingers = new Map();
    let from = null, pans = false, moved = false, spread = 0;
    const place = (event) => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, place(event));
      from = place(event);
      moved = false;
      pans = event.shiftKey || event.pointerType === "touch" || this.rowAt(event) === null;
    });
    canvas.addEventListener("pointermove", (event) => {
      const x = place(event);
      if (fingers.has(event.pointerId) && from !== null) {
        const before = fingers.get(event.pointerId);
        fingers.set(event.pointerId, x);
        moved ||= Math.abs(x - from) > 4;
        tooltip.hide();
        if (fingers.size === 2) {
          const [a, b] = fingers.values(), now = Math.max(20, Math.abs(a - b));
          if (spread) this.scale(spread / now, this.time((a + b) / 2));
          spread = now;
        } else if (pans) this.move((before - x) / this.plot);
        else {
          this.selected = [from, x].map((end) => Math.max(this.left, Math.min(this.left + this.plot, end)));
          this.drawSoon();
        }
      } else this.hint(event.clientX, event.clientY);
    });
    const finish = (event) => {
      if (fingers.delete(event.pointerId) && !fingers.size) {
        if (this.selected && moved) this.show(this.time(Math.min(...this.selected)), this.time(Math.max(...this.selected)));
        else if (!moved && event.type === "pointerup") this.click(event);
        this.selected = from = null;
        this.drawSoon();
      }
      spread = 0;
    };
    canvas.addEventListener("pointerup", finish);
    canvas.addEventListener("pointercancel", finish);
    canvas.addEventListener("pointerleave", () => tooltip.hide());
    canvas.addEventListener("dblclick", () => this.show(this.part.first, this.part.last));
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) this.scale(1.2 ** (event.deltaY / 60), this.time(place(event)));
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / this.plot);
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    this.scroller.addEventListener("scroll", () => this.drawSoon());
  }

  key(event) {
    const act = {
      "+": () => this.scale(0.5), "=": () => this.scale(0.5), "-": () => this.scale(2), "0": () => this.show(this.part.first, this.part.last),
      ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), u: () => this.showUpdate(), s: () => this.showStep(),
      Home: () => this.show(this.part.first, this.part.first + this.view[1] - this.view[0]), End: () => this.show(this.part.last - (this.view[1] - this.view[0]), this.part.last),
      Enter: () => this.toggleAll(),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    act();
    event.preventDefault();
  }

  rowAt(event) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top;
    if (!this.shown || y > this.height - ROW.axis - ROW.overview) return null;
    return this.shown.find((row) => y + this.scroller.scrollTop >= row.y - 2 && y + this.scroller.scrollTop <= row.y + row.height + 2) ?? undefined;
  }

  click(event) {
    const at = this.canvas.getBoundingClientRect(), x = event.clientX - at.left;
    if (event.clientY - at.top > this.height - ROW.overview) { // overview: go there
      const { first, last } = this.part, middle = first + ((x - this.left) / this.plot) * (last - first);
      const half = (this.view[1] - this.view[0]) / 2;
      this.show(middle - half, middle + half);
      return;
    }
    const row = this.rowAt(event);
    if (x < this.left && row?.slots) {
      this.open.has(row.key) ? this.open.delete(row.key) : this.open.add(row.key);
      this.redraw();
    } else this.hint(event.clientX, event.clientY);
  }

  hint(clientX, clientY) {
    if (!this.lanes) return;
    const x = clientX - this.canvas.getBoundingClientRect().left, row = this.rowAt({ clientY });
    const marks = this.marks().filter((mark) => Math.abs(this.x(mark.time) - x) < 6).map((mark) => [mark.colour, mark.name]);
    if ((!row && !marks.length) || x < this.left || x > this.left + this.plot) return tooltip.hide();
    tooltip.show(clientX, clientY, [...marks, ...(row ? this.describe(row, this.time(x)) : [])]);
  }

  /** What a row does at a time: single bars where they are wide enough, otherwise shares of one column of pixels. */
  describe(row, time) {
    const pixel = (this.view[1] - this.view[0]) / this.plot, from = time - pixel / 2, to = time + pixel / 2;
    const bars = [], seconds = new Map();
    for (const lane of row.lanes) {
      for (let at = after(lane.reach, from); at < lane.start.length && lane.start[at] < to; at += 1) {
        const kind = lane.kind[at];
        if (this.part.kinds[kind].waits && !row.slot) continue;
        bars.push([lane, at]);
        const together = row.slots ? Math.max(1, lane.number[at]) : 1;
        seconds.set(kind, (seconds.get(kind) ?? 0) + (Math.min(to, lane.end[at]) - Math.max(from, lane.start[at])) / together);
      }
    }
    const head = `${row.slot ? `${row.station.label}, ` : ""}${row.label} at ${clock(time, Math.min(1, pixel))}`;
    if (!bars.length) return [head, time < row.first || time > row.last ? "not traced" : row.idles ? "idle (bubble)" : "nothing"];
    if (bars.length <= 3) return [head, ...bars.map(([lane, at]) => [`s${this.part.kinds[lane.kind[at]].colour}`, this.barWords(row, lane, at)])];
    const shares = [...seconds].sort((a, b) => b[1] - a[1]).map(([kind, sum]) => [`s${this.part.kinds[kind].colour}`, `${this.part.kinds[kind].label}: ${percentage(sum / pixel)}`]);
    return [head, ...shares, `${bars.length} bars in ${lengthOfTime(pixel)}: zoom in`];
  }

  barWords(row, lane, at) {
    const kind = this.part.kinds[lane.kind[at]], number = lane.number[at];
    const more = { forward: `, ${number} requests`, update: ` ${number}`, apply: ` ${number}`, publish: ` ${number}`, save: ` ${number}`, score: ` ${number}` }[kind.name]
      ?? (number > 1 ? `, ${number} slots together` : "");
    const slot = row.slots ? ` (slot ${lane.name.slice(lane.station.length + 1)})` : "";
    return `${kind.label}${more}${slot}: ${lengthOfTime(lane.end[at] - lane.start[at])} from ${clock(lane.start[at], 0.001)}`;
  }

  destroy() {
    cancelAnimationFrame(this.frame);
  }
}

/** Place of the first value above a limit, in an ascending array. */
function after(sorted, limit) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The text, shortened at its front to a width. */
function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let rest = text;
  while (rest.length > 3 && context.measureText(`…${rest}`).width > width) rest = rest.slice(1);
  return `…${rest}`;
}

function hatching(context, look, ratio) {
  const tile = document.createElement("canvas"), size = Math.round(6 * ratio);
  tile.width = tile.height = size;
  const inside = tile.getContext("2d");
  inside.strokeStyle = look.faint;
  inside.lineWidth = ratio;
  inside.beginPath();
  for (const shift of [-size, 0, size]) {
    inside.moveTo(shift, size);
    inside.lineTo(shift + size, 0);
  }
  inside.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix([1 / ratio, 0, 0, 1 / ratio, 0, 0]));
  return pattern;
}
