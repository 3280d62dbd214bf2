// Numbers as words, and arrays from the page's data.
"use strict";

/** `0`, `0.25`, `12.5`, `800`, `1.25k`, `1.2M`. */
function shortNumber(value) {
  const size = Math.abs(value);
  for (const [factor, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= factor) return `${+(value / factor).toPrecision(3)}${letter}`;
  }
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : `${+value.toPrecision(3)}`;
}

function percentage(value) {
  const digits = value > 0.995 && value < 1 || value > 0 && value < 0.01 ? 1 : 0;
  return `${(100 * value).toFixed(digits)}%`;
}

/** `850 µs`, `12.3 ms`, `4.57 s`. */
function lengthOfTime(seconds) {
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${+(seconds * 1e3).toPrecision(3)} ms`;
  return seconds < 120 ? `${+seconds.toPrecision(3)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

/** A time as `9:41` or `1:02:07`, with digits below a second where ticks are closer than that. */
function clock(seconds, step = 1) {
  const digits = step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step)));
  const whole = Math.floor(Math.abs(seconds) * 10 ** digits + 0.5) / 10 ** digits;
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const rest = (whole % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  const sign = seconds < 0 && whole > 0 ? "−" : "";
  return hours ? `${sign}${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${sign}${minutes}:${rest}`;
}

/** Distances of ticks in seconds: 1, 2, 5 and powers of ten below a second, then those of a clock. */
const TIME_STEPS = [-6, -5, -4, -3, -2, -1].flatMap((power) => [1, 2, 5].map((digit) => +`${digit}e${power}`))
  .concat([1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400]);

/** The bytes of a packed array (see timeline.py): base64, zlib, and the lowest byte of every element first. */
async function unpack(text, Type) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const width = Type.BYTES_PER_ELEMENT, count = planes.length / width;
  if (width === 1) return planes;
  const found = new Type(count);
  for (let byte = 0, at = 0; byte < width; byte += 1) {
    const shift = 8 * byte;
    for (let place = 0; place < count; place += 1, at += 1) found[place] |= planes[at] << shift;
  }
  return found;
}

/** Lanes of a timeline with their bars, from its blocks (see timeline.py). reach: latest end so far, for a binary search. */
async function unpackBars(part) {
  const columns = await Promise.all(part.blocks.map((block) => Promise.all([unpack(block.start, Int32Array),
    unpack(block.length, Int32Array), unpack(block.kind_of, Uint8Array), unpack(block.number, Int32Array)])));
  const lanes = part.lanes.map((lane, number) => {
    const count = part.blocks.reduce((sum, block) => sum + block.counts[number], 0);
    const [start, end, reach] = [0, 1, 2].map(() => new Float64Array(count));
    return { ...lane, start, end, reach, kind: new Uint8Array(count), number: new Int32Array(count) };
  });
  const filled = lanes.map(() => 0), latest = lanes.map(() => -Infinity);
  part.blocks.forEach((block, index) => {
    const [starts, lengths, kinds, numbers] = columns[index];
    let at = 0;
    lanes.forEach((lane, number) => {
      let begin = index * part.window, place = filled[number];
      for (let left = block.counts[number]; left > 0; left -= 1, at += 1, place += 1) {
        begin += starts[at];
        lane.start[place] = part.first + begin * part.unit;
        lane.end[place] = part.first + (begin + lengths[at]) * part.unit;
        lane.reach[place] = latest[number] = Math.max(latest[number], lane.end[place]);
        lane.kind[place] = kinds[at];
        lane.number[place] = numbers[at];
      }
      filled[number] = place;
    });
  });
  return lanes;
}
