// @ts-check
/** The waterfall of a save: a band for each rank, a bar for each span, its parts below it. */
import { api, bytesText, find, secondsText } from "./dom.js";
import { colour, fillBox, fillOf, follow, hatch, ink, label, legend, selectable } from "./canvas.js";

/** @typedef {{ name: string, rank: number, start: number, seconds: number, nbytes: number, rate: number | null, depth: number, lane: number }} Span */

const holder = find("#waterfall");
const canvas = /** @type {HTMLCanvasElement} */ (find("#waterfall-canvas"));
const readout = find("#waterfall-text");
const LANE = 17, GAP = 9, TOP = 24, LEFT = 62, RIGHT = 14, WAITS = -1;

/** @type {{ seconds: number, slowest: number | null, slowdown: number, phases: { name: string, waiting: boolean }[], ranks: { rank: number }[], spans: Span[] } | null} */
let timing = null;
/** @type {Map<number, { top: number, lanes: number }>} */
let bands = new Map();
let phases = /** @type {Map<string, number>} */ (new Map());
let total = 60;
let chosen = -1;

function arrange() {
  if (!timing) return;
  bands = new Map();
  total = TOP;
  for (const { rank } of timing.ranks) {
    const lanes = 1 + timing.spans.reduce((most, span) => (span.rank === rank ? Math.max(most, span.lane) : most), 0);
    bands.set(rank, { top: total, lanes });
    total += lanes * LANE + GAP;
  }
  // the outermost phase is the frame of the others and stays grey
  const inner = timing.phases.filter(({ name }) => name !== "save");
  phases = new Map([...inner.filter((p) => !p.waiting).map(({ name }, at) => /** @type {[string, number]} */ ([name, at])), ...inner.filter((p) => p.waiting).map(({ name }) => /** @type {[string, number]} */ ([name, WAITS]))]);
}

/** A phase's box; waiting is no work, and pale. @param {CanvasRenderingContext2D} g @param {number} phase @param {number} x @param {number} y @param {number} w @param {number} h */
function bar(g, phase, x, y, w, h) {
  if (phase !== WAITS) { fillBox(g, phase, x, y, w, h); return; }
  g.fillStyle = colour("--soft");
  g.fillRect(x, y, w, h);
  hatch(g, x, y, w, h, colour("--dim"), 6, 0.35);
}

/** @param {Span} span @param {number} width */
function place(span, width) {
  const t = /** @type {NonNullable<typeof timing>} */ (timing);
  const s = (width - LEFT - RIGHT) / Math.max(t.seconds, 1e-9);
  const band = bands.get(span.rank) ?? { top: 0, lanes: 1 };
  return [LEFT + span.start * s, band.top + span.lane * LANE, Math.max(1, span.seconds * s), LANE - 2];
}

/** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height */
function draw(g, width, height) {
  g.clearRect(0, 0, width, height);
  if (!timing) return;
  ruler(g, width, height);
  for (const [rank, { top, lanes }] of bands) {
    const slow = rank === timing.slowest && timing.slowdown > 1.2;
    if (slow) { g.fillStyle = colour("--warn-soft"); g.fillRect(0, top - 4, width, lanes * LANE + 6); }
    g.fillStyle = colour(slow ? "--warn" : "--dim");
    g.textAlign = "left";
    g.fillText(`rank ${rank}`, 6, top + LANE / 2);
    if (slow && lanes > 1) g.fillText("slowest", 6, top + LANE * 1.5);
  }
  timing.spans.forEach((span, at) => {
    const [x, y, w, h] = place(span, width);
    const phase = phases.get(span.name);
    let paint = colour("--text");
    if (phase === undefined) { g.fillStyle = colour("--grid"); g.fillRect(x, y, w, h); } else bar(g, phase, x, y, w, h);
    if (phase !== undefined && phase !== WAITS) paint = ink(fillOf(phase));
    label(g, span.name, x, y, w, h, paint);
    if (at === chosen) { g.strokeStyle = colour("--text"); g.lineWidth = 2; g.strokeRect(x - 1, y - 1, w + 2, h + 2); }
  });
}

/** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height */
function ruler(g, width, height) {
  const seconds = timing?.seconds ?? 0;
  const room = width - LEFT - RIGHT;
  const rough = seconds / Math.max(2, Math.floor(room / 110));
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? rough;
  g.strokeStyle = colour("--line");
  g.fillStyle = colour("--dim");
  g.lineWidth = 1;
  for (let at = 0; step > 0 && at <= seconds * 1.0001; at += step) {
    const x = Math.round(LEFT + (at / seconds) * room) + 0.5;
    g.beginPath();
    g.moveTo(x, TOP - 6);
    g.lineTo(x, height);
    g.stroke();
    const text = secondsText(Number(at.toPrecision(6)));
    g.textAlign = x + g.measureText(text).width / 2 > width ? "right" : "center";
    g.fillText(text, x, 9);
  }
}

const redraw = follow(canvas, { height: () => total, draw });

selectable(canvas, {
  count: () => timing?.spans.length ?? 0,
  at: (x, y) => timing?.spans.findIndex((span) => {
    const [left, top, w, h] = place(span, canvas.clientWidth);
    return x >= left - 1 && x <= left + Math.max(w, 3) && y >= top && y <= top + h;
  }) ?? -1,
  select: (item) => {
    chosen = item;
    redraw();
    const span = timing?.spans[item];
    const rate = span?.rate ? ` · ${bytesText(span.nbytes)} at ${bytesText(span.rate)}/s` : "";
    readout.textContent = span ? `rank ${span.rank} · ${span.name} · ${secondsText(span.seconds)}, from ${secondsText(span.start)} on${rate}` : "\u00a0";
  },
});

try {
  timing = await api(`checkpoints/${holder.dataset.checkpoint}/timing`, { start: holder.dataset.start });
  arrange();
  legend(find("#phase-legend"), [...phases].map(([name, number]) => ({
    text: number === WAITS ? `${name} (waiting)` : name,
    draw: (/** @type {CanvasRenderingContext2D} */ g) => bar(g, number, 0, 0, 13, 13),
  })));
  redraw();
} catch (error) {
  readout.textContent = `The waterfall cannot be drawn: ${error instanceof Error ? error.message : error}`;
}
