// @ts-check
/** The heat map of a save: the time of each rank, or group of ranks, in each phase. */
import { api, drawn, find, secondsText } from "./dom.js";
import { colour, hatch, legend, noter } from "./canvas.js";
import { LEFT, colourScale, heatGrid, lostText, short } from "./heat_grid.js";
import { WAITS, drawPhase, paintOf } from "./phases.js";

/**
 * @typedef {{
 *   by: string, phases: string[], waiting: boolean[], unit: number, labels: string[], medians: number[],
 *   most_lost: number, times: number[][], slowest: number[][],
 * }} Heat
 */

/** Pixels above the cells: names of narrow columns are turned. @param {number} column @returns {number} */
const headOf = (column) => (column < 70 ? 80 : 30);

/**
 * Writes the names of phases above their columns, with their colours; hatches those in which ranks wait.
 * @param {CanvasRenderingContext2D} g @param {string[]} phases @param {boolean[]} waiting @param {number} cw
 * @param {number} top @param {number} bottom
 */
function drawPhases(g, phases, waiting, cw, top, bottom) {
  const turned = headOf(cw) > 30;
  phases.forEach((name, c) => {
    const paint = paintOf(name, waiting[c]);
    drawPhase(g, paint, LEFT + c * cw + 0.5, top - 6, Math.max(1, cw - 1), 4);
    if (paint === WAITS) hatch(g, LEFT + c * cw, top, cw, bottom - top, colour("--dim"), 6, 0.35);
    g.fillStyle = colour("--dim");
    if (cw < 11 && c % Math.ceil(11 / cw)) return;
    g.save();
    g.translate(LEFT + (c + 0.5) * cw, top - 14);
    g.textAlign = turned ? "left" : "center";
    if (turned) g.rotate(-Math.PI / 3);
    g.fillText(short(g, name, turned ? 70 : cw - 4), 0, 0);
    g.restore();
  });
}

async function load() {
  const holder = find("#heat");
  const canvas = /** @type {HTMLCanvasElement} */ (find("#heat-canvas"));
  const note = noter(find("#heat .drawing"), find("#heat-text"));
  const address = `checkpoints/${find("#waterfall").dataset.checkpoint}/timing/heat`;
  const data = /** @type {Heat} */ (await api(address, { by: holder.dataset.by }));
  const rows = data.labels.length;
  const columns = data.phases.length;
  if (!rows || !columns) {
    note("There is no phase to draw.");
    return;
  }
  const top = data.times.reduce(
    (most, times, c) => (data.waiting[c] ? most : times.reduce((m, n) => Math.max(m, n), most)),
    1,
  );
  const redraw = heatGrid(canvas, note, {
    values: () => data.times,
    stops: () => scale.stops(),
    // who waits for others loses nothing
    share: (n, c) =>
      data.waiting[c] ? -1 : scale.all() ? n / top : Math.max(0, (n - data.medians[c]) / data.most_lost),
    state: () => String(scale.all()),
    body: () => Math.max(40, Math.min(460, rows * 26)),
    head: (width) => headOf((width - LEFT - 8) / columns),
    foot: 4,
    rowLabel: (r) => data.labels[r],
    drawColumns: (g, cw, up, down) => drawPhases(g, data.phases, data.waiting, cw, up, down),
    textOf: (r, c) => {
      const n = data.times[c][r];
      const whose = data.slowest.length ? `, at most: rank ${data.slowest[c][r]}` : "";
      const lost = n < 0 || data.waiting[c] ? "" : lostText((n - data.medians[c]) * data.unit);
      const time = n < 0 ? "no such phase" : secondsText(n * data.unit) + lost + whose;
      return `${data.labels[r]} · ${data.phases[c]} · ${time}`;
    },
  });
  const signs = [
    { text: "waiting for other ranks", of: () => data.waiting.some(Boolean), alpha: 0.35 },
    { text: "no such phase", of: () => data.times.some((times) => times.some((n) => n < 0)), alpha: 0 },
  ];
  legend(
    find("#heat-legend"),
    signs.filter((sign) => sign.of()).map(({ text, alpha }) => ({
      text,
      draw: (/** @type {CanvasRenderingContext2D} */ g) => {
        hatch(g, 0, 0, 13, 13, colour("--dim"), 6, alpha);
        g.strokeStyle = colour("--line");
        g.strokeRect(0.5, 0.5, 12, 12);
      },
    })),
  );
  const ends = { lost: () => data.most_lost * data.unit, longest: () => top * data.unit };
  const scale = colourScale("scale", ends, redraw);
  scale.showEnds();
  redraw();
}
drawn(find("#heat-text"), "Heat map", load);
