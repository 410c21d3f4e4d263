// @ts-check
/** Draws the waterfall of a save: ranks from top to bottom, time from left to right. */
import { numberText, secondsText } from "./dom.js";
import { colour, fillOf, ink, label } from "./canvas.js";
import { drawPhase } from "./phases.js";
import { LANE, TOP } from "./waterfall_layout.js";

/** @typedef {import("./waterfall_layout.js").Columns} Columns */
/** @typedef {import("./waterfall_layout.js").Band} Band */
/** @typedef {import("./waterfall_layout.js").View} View */
/**
 * What is drawn, and which part of it.
 * `paints` has the colour number of each phase, WAITS or FRAME; `rows` has positions of ranks in drawing order;
 * `chosen` is a span in detail, a band in the overview, or -1; `drag` is the rectangle under the pointer.
 * @typedef {{
 *   data: Columns, edges: Int32Array, rows: Int32Array, paints: number[], stragglers: Set<number>,
 *   slowest: number | null, order: string, view: View, chosen: number,
 *   layout: { bands: Band[], height: number, detail: boolean },
 *   drag: { x0: number, y0: number, x1: number, y1: number } | null,
 * }} Scene
 */

export const LEFT = 68;
export const RIGHT = 14;

/** Pixels per unit of time. @param {View} view @param {number} width */
export const pixelsPerUnit = (view, width) => (width - LEFT - RIGHT) / Math.max(view.t1 - view.t0, 1e-9);

/** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height @param {Scene} scene */
export function drawWaterfall(g, width, height, scene) {
  g.clearRect(0, 0, width, height);
  const { layout, drag } = scene;
  const scale = pixelsPerUnit(scene.view, width);
  drawRuler(g, width, height, scene);
  drawNames(g, width, scene);
  g.save();
  g.beginPath();
  g.rect(LEFT - 1, 0, width - LEFT - RIGHT + 2, height);
  g.clip();
  for (const band of layout.bands) drawSpans(g, band, scale, scene);
  drawCriticalPath(g, scale, scene);
  drawBlocking(g, scale, height, scene);
  if (drag) {
    g.fillStyle = colour("--accent");
    g.globalAlpha = 0.18;
    g.fillRect(
      Math.min(drag.x0, drag.x1),
      layout.detail ? TOP : Math.min(drag.y0, drag.y1),
      Math.abs(drag.x1 - drag.x0),
      layout.detail ? height : Math.abs(drag.y1 - drag.y0),
    );
  }
  g.restore();
}

/** @param {CanvasRenderingContext2D} g @param {Band} band @param {number} scale @param {Scene} scene */
function drawSpans(g, band, scale, scene) {
  const { data: d, edges, layout, view } = scene;
  const thin = band.height < 6;
  for (let at = edges[band.row]; at < edges[band.row + 1]; at += 1) {
    const x = LEFT + (d.start[at] - view.t0) * scale;
    const w = Math.max(thin ? 0.5 : 1, d.length[at] * scale);
    if (x + w < LEFT || d.start[at] > view.t1) continue;
    const y = layout.detail ? band.top + d.lane[at] * LANE : band.top;
    const h = layout.detail ? LANE - 2 : band.height;
    const phase = scene.paints[d.phase[at]];
    drawPhase(g, phase, x, y, w, h);
    if (!layout.detail) continue;
    const left = Math.max(x, LEFT);
    const shown = Math.min(x + w, LEFT + (view.t1 - view.t0) * scale) - left;
    label(g, d.phases[d.phase[at]], left, y, shown, h, phase >= 0 ? ink(fillOf(phase)) : colour("--text"));
    if (at === scene.chosen) {
      g.strokeStyle = colour("--text");
      g.lineWidth = 2;
      g.strokeRect(x - 1, y - 1, w + 2, h + 2);
    }
  }
}

/**
 * Marks a line of the overview: a wedge that is as high however thin the line is, and a strip behind all of it.
 * @param {CanvasRenderingContext2D} g @param {number} width @param {Band} band
 */
function drawStrip(g, width, band) {
  const [middle, high] = [band.top + band.height / 2, Math.max(4, band.height)];
  g.fillStyle = colour("--warn-soft");
  g.fillRect(LEFT, middle - high / 2, width - LEFT - RIGHT, high);
  g.fillStyle = colour("--bad");
  g.beginPath();
  g.moveTo(LEFT - 12, middle - 5);
  g.lineTo(LEFT - 2, middle);
  g.lineTo(LEFT - 12, middle + 5);
  g.fill();
}

/**
 * Draws the names of ranks beside their bands, and marks the slow ones.
 * @param {CanvasRenderingContext2D} g @param {number} width @param {Scene} scene
 */
function drawNames(g, width, scene) {
  const { data, layout, order, slowest, stragglers } = scene;
  let free = 0;
  layout.bands.forEach((band, at) => {
    let odd = stragglers.has(band.rank) || band.rank === slowest;
    for (let row = band.from; !odd && row < band.to; row += 1) odd = stragglers.has(data.ranks[scene.rows[row]]);
    if (layout.detail && odd) {
      g.fillStyle = colour("--warn-soft");
      g.fillRect(0, band.top - 4, width, band.height + 6);
    }
    if (!layout.detail && odd) drawStrip(g, width, band);
    if (!layout.detail && at === scene.chosen) {
      g.fillStyle = colour("--accent-soft");
      g.fillRect(0, band.top - 2, width, band.height + 4);
    }
    if (!layout.detail && band.top < free) return;
    g.fillStyle = colour(layout.detail && odd ? "--warn" : "--dim");
    g.textAlign = "left";
    g.fillText(
      layout.detail
        ? `rank ${band.rank}`
        : order === "rank"
          ? numberText(band.from)
          : `${numberText(band.from + 1)}.`,
      6,
      layout.detail ? band.top + LANE / 2 : band.top + 6,
    );
    const note = band.rank === slowest ? "slowest" : stragglers.has(band.rank) ? "straggler" : "";
    if (layout.detail && band.height > LANE) g.fillText(note, 6, band.top + LANE * 1.5);
    free = band.top + 40;
  });
}

/**
 * Draws the critical path as a line at the bottom of the bands that it passes through.
 * @param {CanvasRenderingContext2D} g @param {number} scale @param {Scene} scene
 */
function drawCriticalPath(g, scale, { data, layout, rows, view }) {
  const place = new Map(
    layout.bands.flatMap((band) => {
      /** @type {[number, Band][]} */
      const pairs = [];
      for (let at = band.from; at < band.to; at += 1) pairs.push([rows[at], band]);
      return pairs;
    }),
  );
  g.fillStyle = colour("--text");
  for (const [row, start, length] of data.critical) {
    const band = place.get(row);
    if (!band) continue;
    g.fillRect(
      LEFT + (start - view.t0) * scale,
      layout.detail ? band.top + band.height - 1 : band.top + Math.max(0, band.height - 2),
      Math.max(2, length * scale),
      layout.detail ? 3 : 2,
    );
  }
}

/**
 * Draws when the calls of ranks returned and training continued.
 * @param {CanvasRenderingContext2D} g @param {number} scale @param {number} height @param {Scene} scene
 */
function drawBlocking(g, scale, height, { data, layout, view }) {
  const ends = data.blocked.filter((at) => at !== null);
  if (!ends.length) return;
  g.fillStyle = colour("--bad");
  if (layout.detail) {
    for (const band of layout.bands) {
      const at = data.blocked[band.row];
      if (at !== null) g.fillRect(LEFT + (at - view.t0) * scale - 1, band.top - 3, 2, band.height + 4);
    }
  }
  const x = LEFT + (ends.reduce((most, at) => Math.max(most, at), 0) - view.t0) * scale;
  g.strokeStyle = colour("--bad");
  g.lineWidth = 1.5;
  g.setLineDash([5, 4]);
  g.beginPath();
  g.moveTo(x, TOP - 8);
  g.lineTo(x, height);
  g.stroke();
  g.setLineDash([]);
}

/** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height @param {Scene} scene */
function drawRuler(g, width, height, { data, view }) {
  const [from, to] = [view.t0 * data.unit, view.t1 * data.unit];
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
    const text = secondsText(Number((n * step).toPrecision(6)));
    const half = g.measureText(text).width / 2;
    g.textAlign = "center";
    g.fillText(text, Math.min(x, width - half - 2), 9);
  }
}
