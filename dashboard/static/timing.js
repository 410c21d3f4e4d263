// @ts-check
/** The timing of a save: the waterfall with its zoom, and the heat map. The view stands in the address. */
import { api, bytesText, find, make, numberText, secondsText } from "./dom.js";
import { colour, fillBox, fillOf, follow, hatch, ink, label, legend } from "./canvas.js";
import { LANE, TOP, bandsOf, edgesOf, orderOf, spanAt } from "./waterfall.js";
import { noter } from "./tip.js";
import { heatMap } from "./heatmap.js";

/** @typedef {import("./waterfall.js").Columns} Columns */
/** @typedef {import("./waterfall.js").Band} Band */

/** Phases that the legend names. */
const NAMED = 24;
const holder = find("#waterfall");
const canvas = /** @type {HTMLCanvasElement} */ (find("#waterfall-canvas"));
const note = noter(find("#waterfall .drawing"), find("#waterfall-text"));
const LEFT = 62, RIGHT = 14, WAITS = -1, FRAME = -2;
const slow = holder.dataset.slow === "" ? null : Number(holder.dataset.slow);

/** @type {Columns | null} */
let data = null;
let edges = new Int32Array(1), rows = new Int32Array(0);
let view = { t0: 0, t1: 1, r0: 0, r1: 0 };
let order = "rank";
/** @type {{ bands: Band[], height: number, detail: boolean }} */
let laid = { bands: [], height: 60, detail: true };
/** The number by which each phase is coloured. @type {number[]} */
let paints = [];
/** @type {Set<number>} */
let straggling = new Set();
/** A span in detail, a band in the overview; -1 for none. */
let chosen = -1;
/** @type {{ x0: number, y0: number, x1: number, y1: number } | null} */
let drag = null;

/** A phase's box; waiting is no work, and pale. @param {CanvasRenderingContext2D} g @param {number} phase @param {number} x @param {number} y @param {number} w @param {number} h */
function bar(g, phase, x, y, w, h) {
  if (phase >= 0 && h >= 6) { fillBox(g, phase, x, y, w, h); return; }
  g.fillStyle = phase >= 0 ? fillOf(phase) : colour(phase === WAITS ? "--soft" : "--grid");
  g.fillRect(x, y, w, h);
  if (phase === WAITS && h >= 6) hatch(g, x, y, w, h, colour("--dim"), 6, 0.35);
}

/** Pixels to a unit of time. @param {number} width */
const scale = (width) => (width - LEFT - RIGHT) / Math.max(view.t1 - view.t0, 1e-9);

/** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height */
function draw(g, width, height) {
  g.clearRect(0, 0, width, height);
  if (!data) return;
  ruler(g, width, height);
  const s = scale(width);
  names(g, width);
  g.save();
  g.beginPath();
  g.rect(LEFT - 1, 0, width - LEFT - RIGHT + 2, height);
  g.clip();
  for (const band of laid.bands) spansOf(g, band, s);
  critical(g, s);
  blocking(g, s, height);
  if (drag) { g.fillStyle = colour("--accent"); g.globalAlpha = 0.18; g.fillRect(Math.min(drag.x0, drag.x1), laid.detail ? TOP : Math.min(drag.y0, drag.y1), Math.abs(drag.x1 - drag.x0), laid.detail ? height : Math.abs(drag.y1 - drag.y0)); }
  g.restore();
}

/** @param {CanvasRenderingContext2D} g @param {Band} band @param {number} s */
function spansOf(g, band, s) {
  const d = /** @type {Columns} */ (data);
  const thin = band.height < 6;
  for (let at = edges[band.row]; at < edges[band.row + 1]; at += 1) {
    const x = LEFT + (d.start[at] - view.t0) * s, w = Math.max(thin ? 0.5 : 1, d.length[at] * s);
    if (x + w < LEFT || d.start[at] > view.t1) continue;
    const y = laid.detail ? band.top + d.lane[at] * LANE : band.top, h = laid.detail ? LANE - 2 : band.height;
    const phase = paints[d.phase[at]];
    bar(g, phase, x, y, w, h);
    if (!laid.detail) continue;
    const left = Math.max(x, LEFT), shown = Math.min(x + w, LEFT + (view.t1 - view.t0) * s) - left;
    label(g, d.phases[d.phase[at]], left, y, shown, h, phase >= 0 ? ink(fillOf(phase)) : colour("--text"));
    if (at === chosen) { g.strokeStyle = colour("--text"); g.lineWidth = 2; g.strokeRect(x - 1, y - 1, w + 2, h + 2); }
  }
}

/** Who the bands are, and who is slow. @param {CanvasRenderingContext2D} g @param {number} width */
function names(g, width) {
  let free = 0;
  laid.bands.forEach((band, at) => {
    const d = /** @type {Columns} */ (data);
    let odd = straggling.has(band.rank) || band.rank === slow;
    for (let row = band.from; !odd && row < band.to; row += 1) odd = straggling.has(d.ranks[rows[row]]);
    if (laid.detail && odd) { g.fillStyle = colour("--warn-soft"); g.fillRect(0, band.top - 4, width, band.height + 6); }
    if (!laid.detail && odd) { g.fillStyle = colour("--warn"); g.fillRect(LEFT - 7, band.top - 0.5, 5, Math.max(2, band.height)); }
    if (!laid.detail && at === chosen) { g.fillStyle = colour("--accent-soft"); g.fillRect(0, band.top - 2, width, band.height + 4); }
    if (!laid.detail && band.top < free) return;
    g.fillStyle = colour(laid.detail && odd ? "--warn" : "--dim");
    g.textAlign = "left";
    g.fillText(laid.detail ? `rank ${band.rank}` : order === "rank" ? numberText(band.from) : `${numberText(band.from + 1)}.`, 6, laid.detail ? band.top + LANE / 2 : band.top + 6);
    if (laid.detail && band.rank === slow && band.height > LANE) g.fillText("slowest", 6, band.top + LANE * 1.5);
    free = band.top + 40;
  });
}

/** The critical path, as a line along the foot of what it goes through. @param {CanvasRenderingContext2D} g @param {number} s */
function critical(g, s) {
  const d = /** @type {Columns} */ (data);
  const place = new Map(laid.bands.flatMap((band) => {
    /** @type {[number, Band][]} */
    const pairs = [];
    for (let at = band.from; at < band.to; at += 1) pairs.push([rows[at], band]);
    return pairs;
  }));
  g.fillStyle = colour("--text");
  for (const [row, start, length] of d.critical) {
    const band = place.get(row);
    if (!band) continue;
    g.fillRect(LEFT + (start - view.t0) * s, laid.detail ? band.top + band.height - 1 : band.top + Math.max(0, band.height - 2), Math.max(2, length * s), laid.detail ? 3 : 2);
  }
}

/** When calls returned, and training went on. @param {CanvasRenderingContext2D} g @param {number} s @param {number} height */
function blocking(g, s, height) {
  const d = /** @type {Columns} */ (data);
  const ends = d.blocked.filter((at) => at !== null);
  if (!ends.length) return;
  g.fillStyle = colour("--bad");
  if (laid.detail) {
    for (const band of laid.bands) { const at = d.blocked[band.row]; if (at !== null) g.fillRect(LEFT + (at - view.t0) * s - 1, band.top - 3, 2, band.height + 4); }
  }
  const x = LEFT + (ends.reduce((most, at) => Math.max(most, at), 0) - view.t0) * s;
  g.strokeStyle = colour("--bad");
  g.lineWidth = 1.5;
  g.setLineDash([5, 4]);
  g.beginPath();
  g.moveTo(x, TOP - 8);
  g.lineTo(x, height);
  g.stroke();
  g.setLineDash([]);
}

/** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height */
function ruler(g, width, height) {
  const d = /** @type {Columns} */ (data);
  const [from, to] = [view.t0 * d.unit, view.t1 * d.unit];
  const room = width - LEFT - RIGHT;
  const rough = (to - from) / Math.max(2, Math.floor(room / 110));
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? rough;
  g.strokeStyle = colour("--line");
  g.fillStyle = colour("--dim");
  g.lineWidth = 1;
  for (let n = Math.ceil(from / step - 1e-9); step > 0 && n * step <= to * 1.0001; n += 1) {
    const x = Math.round(LEFT + ((n * step - from) / (to - from)) * room) + 0.5;
    g.beginPath();
    g.moveTo(x, TOP - 8);
    g.lineTo(x, height);
    g.stroke();
    const text = secondsText(Number((n * step).toPrecision(6))), half = g.measureText(text).width / 2;
    g.textAlign = "center";
    g.fillText(text, Math.min(x, width - half - 2), 9);
  }
}

const redraw = follow(canvas, { height: () => laid.height, draw });

function show() {
  if (!data) return;
  laid = bandsOf(data, edges, rows, view);
  const whole = view.t0 === 0 && view.t1 === data.total && view.r0 === 0 && view.r1 === rows.length;
  /** @type {HTMLButtonElement} */ (find("#zoom-reset")).disabled = whole;
  for (const button of document.querySelectorAll("[data-order]")) button.setAttribute("aria-pressed", String(/** @type {HTMLElement} */ (button).dataset.order === order));
  const binned = !laid.detail && laid.bands.length < view.r1 - view.r0;
  find("#waterfall-about").textContent = laid.detail ? "" : `${numberText(view.r1 - view.r0)} ranks${binned ? `; each line is the slowest of ${Math.ceil((view.r1 - view.r0) / laid.bands.length)}` : ""}. Drag over a part, or press Enter on a line, to see its spans.`;
  redraw();
  remember(whole);
}

/** Keeps the view in the address. @param {boolean} whole */
function remember(whole) {
  const d = /** @type {Columns} */ (data);
  const url = new URL(location.href);
  const set = (/** @type {string} */ name, /** @type {string | null} */ value) => { if (value === null) url.searchParams.delete(name); else url.searchParams.set(name, value); };
  set("t", whole || (view.t0 === 0 && view.t1 === d.total) ? null : `${Number((view.t0 * d.unit).toPrecision(6))}-${Number((view.t1 * d.unit).toPrecision(6))}`);
  set("r", view.r0 === 0 && view.r1 === rows.length ? null : `${view.r0}-${view.r1}`);
  set("order", order === "rank" ? null : order);
  if (url.href !== location.href) history.replaceState(null, "", url);
}

/** The view that the address asks for. */
function recall() {
  const d = /** @type {Columns} */ (data);
  const asked = new URL(location.href).searchParams;
  order = asked.get("order") === "slow" ? "slow" : "rank";
  rows = orderOf(d, order);
  const pair = (/** @type {string} */ name) => (asked.get(name) ?? "").match(/^([\d.e-]+?)-([\d.e-]+)$/)?.slice(1).map(Number) ?? [];
  zoom(...fit(pair("t").map((n) => n / d.unit), d.total), ...fit(pair("r").map(Math.round), rows.length));
}

/** Two bounds within 0 and `size`, all of it where they make no sense. @param {number[]} bounds @param {number} size @returns {[number, number]} */
const fit = ([low, high], size) => (low < high && low < size && high > 0 ? [Math.max(0, low), Math.min(size, high)] : [0, size]);

/** @param {number} t0 @param {number} t1 @param {number} r0 @param {number} r1 */
function zoom(t0, t1, r0, r1) {
  chosen = -1;
  view = { t0, t1, r0, r1 };
  show();
}

/** Zooms time about the middle, or about what is chosen. @param {number} factor */
function zoomBy(factor) {
  const d = /** @type {Columns} */ (data);
  const middle = laid.detail && chosen >= 0 ? d.start[chosen] + d.length[chosen] / 2 : (view.t0 + view.t1) / 2;
  const half = Math.max((view.t1 - view.t0) * factor, 4) / 2;
  const keep = chosen;
  zoom(...fit([middle - half, middle + half], d.total), view.r0, view.r1);
  if (laid.detail) { chosen = keep; redraw(); }
}

const reset = () => { if (data) zoom(0, data.total, 0, rows.length); };

/** What is chosen, in words. @param {number} item */
function textOf(item) {
  const d = /** @type {Columns} */ (data);
  if (item < 0) return "";
  if (!laid.detail) {
    const band = laid.bands[item];
    const more = band.to - band.from > 1 ? `, the slowest of ${band.to - band.from}` : "";
    return `rank ${band.rank}${more} · own work ${secondsText(d.busy[band.row] * d.unit)}${straggling.has(band.rank) ? " · straggler" : ""}`;
  }
  let row = 0;
  for (const band of laid.bands) if (item >= edges[band.row] && item < edges[band.row + 1]) row = band.row;
  const took = d.length[item] * d.unit;
  const rate = d.nbytes[item] && took ? ` · ${bytesText(d.nbytes[item])} at ${bytesText(d.nbytes[item] / took)}/s` : "";
  return `rank ${d.ranks[row]} · ${d.phases[d.phase[item]]} · ${secondsText(took)}, from ${secondsText(d.start[item] * d.unit)} on${rate}`;
}

/** @param {number} item @param {{ x: number, y: number } | null} [at] */
function choose(item, at = null) {
  const changed = item !== chosen;
  chosen = item;
  note(data ? textOf(item) : "", at);
  if (changed) redraw();
}

/** @param {number} x @param {number} y */
function itemAt(x, y) {
  if (!data || x < LEFT) return -1;
  const at = laid.bands.findIndex((band) => y >= band.top - 1 && y < band.top + band.height + 1);
  if (at < 0 || !laid.detail) return at;
  const s = scale(canvas.clientWidth), band = laid.bands[at];
  return spanAt(data, edges, band, view.t0 + (x - LEFT) / s, Math.floor((y - band.top) / LANE), 1.5 / s);
}

canvas.addEventListener("pointermove", (event) => {
  if (drag) { drag = { ...drag, x1: event.offsetX, y1: event.offsetY }; redraw(); return; }
  choose(itemAt(event.offsetX, event.offsetY), { x: event.offsetX, y: event.offsetY });
});
canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || !data) return;
  drag = { x0: event.offsetX, y0: event.offsetY, x1: event.offsetX, y1: event.offsetY };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", (event) => {
  const box = drag;
  drag = null;
  if (!box || !data) return;
  if (Math.abs(box.x1 - box.x0) < 6 && Math.abs(box.y1 - box.y0) < 6) { choose(itemAt(event.offsetX, event.offsetY)); redraw(); return; }
  const s = scale(canvas.clientWidth), time = (/** @type {number} */ x) => view.t0 + (x - LEFT) / s;
  const [t0, t1] = Math.abs(box.x1 - box.x0) < 6 ? [view.t0, view.t1] : fit([time(Math.min(box.x0, box.x1)), time(Math.max(box.x0, box.x1))], data.total);
  const [top, bottom] = [Math.min(box.y0, box.y1), Math.max(box.y0, box.y1)];
  const hit = laid.bands.filter((band) => band.top + band.height > top && band.top < bottom);
  const keep = laid.detail || bottom - top < 6 || !hit.length;
  zoom(t0, t1, keep ? view.r0 : hit[0].from, keep ? view.r1 : hit[hit.length - 1].to);
});
canvas.addEventListener("pointercancel", () => { drag = null; redraw(); });
canvas.addEventListener("pointerleave", () => { if (!drag) choose(-1); });
canvas.addEventListener("dblclick", reset);

canvas.addEventListener("keydown", (event) => {
  if (!data || event.ctrlKey || event.metaKey || event.altKey) return;
  /** What the arrows walk through: the spans of the ranks in view, in their order, or the lines. @type {number[]} */
  const items = laid.detail ? laid.bands.flatMap((band) => Array.from({ length: edges[band.row + 1] - edges[band.row] }, (_, n) => edges[band.row] + n)) : laid.bands.map((_, at) => at);
  const at = items.indexOf(chosen);
  /** @type {Record<string, () => void>} */
  const keys = {
    ArrowRight: () => choose(items[Math.min(at + 1, items.length - 1)] ?? -1),
    ArrowLeft: () => choose(items[Math.max(at - 1, 0)] ?? -1),
    Home: () => choose(items[0] ?? -1),
    End: () => choose(items[items.length - 1] ?? -1),
    "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), 0: reset,
    Escape: () => { if (chosen >= 0) choose(-1); else reset(); },
    Enter: () => { if (!laid.detail && chosen >= 0) { const from = Math.max(0, Math.min(laid.bands[chosen].from - 8, rows.length - 24)); zoom(view.t0, view.t1, from, Math.min(rows.length, from + 24)); } },
  };
  keys.ArrowDown = keys.ArrowRight;
  keys.ArrowUp = keys.ArrowLeft;
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});

find("#zoom-in").addEventListener("click", () => zoomBy(0.5));
find("#zoom-out").addEventListener("click", () => zoomBy(2));
find("#zoom-reset").addEventListener("click", reset);
for (const button of document.querySelectorAll("[data-order]")) {
  button.addEventListener("click", () => {
    if (!data) return;
    order = /** @type {HTMLElement} */ (button).dataset.order ?? "rank";
    rows = orderOf(data, order);
    zoom(view.t0, view.t1, view.r0, view.r1);
  });
}

async function start() {
  const at = `checkpoints/${holder.dataset.checkpoint}/timing`;
  heatMap(at);
  data = /** @type {Columns} */ (await api(`${at}/waterfall`));
  edges = edgesOf(data);
  straggling = new Set(data.stragglers);
  // the outermost phase is the frame of the others and stays grey
  let next = 0;
  paints = data.phases.map((name, n) => (name === "save" ? FRAME : /** @type {Columns} */ (data).waiting[n] ? WAITS : next++));
  const shown = data.phases.map((name, n) => ({ name, paint: paints[n] })).filter(({ paint }) => paint !== FRAME);
  const list = find("#phase-legend");
  legend(list, shown.sort((a, b) => Number(a.paint === WAITS) - Number(b.paint === WAITS)).slice(0, NAMED).map(({ name, paint }) => ({
    text: paint === WAITS ? `${name} (waiting)` : name,
    draw: (/** @type {CanvasRenderingContext2D} */ g) => bar(g, paint, 0, 0, 13, 13),
  })));
  if (shown.length > NAMED) list.append(make("li", {}, `and ${numberText(shown.length - NAMED)} more phases`));
  recall();
}

start().catch((error) => { note(`The waterfall cannot be drawn: ${error instanceof Error ? error.message : error}`); });
