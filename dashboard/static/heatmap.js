// @ts-check
/** The heat map of a save: the time of each rank, or group of ranks, in each phase. */
import { api, drawn, find, secondsText } from "./dom.js";
import { noter } from "./canvas.js";
import { LEFT, colourScale, heatGrid, short } from "./heat_grid.js";

/**
 * @typedef {{
 *   by: string, phases: string[], waiting: boolean[], unit: number, labels: string[], medians: number[],
 *   times: number[][], slowest: number[][],
 * }} Heat
 */

/** Pixels above the cells: names of narrow columns are turned. @param {number} column @returns {number} */
const headOf = (column) => (column < 70 ? 74 : 24);

/**
 * Writes the names of phases above their columns.
 * @param {CanvasRenderingContext2D} g @param {string[]} phases @param {number} cw @param {number} top
 */
function drawPhases(g, phases, cw, top) {
  const turned = headOf(cw) > 30;
  phases.forEach((name, c) => {
    if (cw < 11 && c % Math.ceil(11 / cw)) return;
    g.save();
    g.translate(LEFT + (c + 0.5) * cw, top - 8);
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
    // within a phase, colours go from the median rank's time to three times that
    share: (n, c) => (scale.bySeconds() ? n / top : (n / Math.max(1, data.medians[c]) - 1) / 2),
    state: () => String(scale.bySeconds()),
    body: () => Math.max(40, Math.min(460, rows * 26)),
    head: (width) => headOf((width - LEFT - 8) / columns),
    foot: 4,
    rowLabel: (r) => data.labels[r],
    drawColumns: (g, cw, up) => drawPhases(g, data.phases, cw, up),
    textOf: (r, c) => {
      const n = data.times[c][r];
      const whose = data.slowest.length ? `, at most: rank ${data.slowest[c][r]}` : "";
      const times = n > 0 && data.medians[c] ? `, ${(n / data.medians[c]).toFixed(1)}× the median rank` : "";
      const time = n < 0 ? "no such phase" : secondsText(n * data.unit) + times + whose;
      return `${data.labels[r]} · ${data.phases[c]} · ${time}`;
    },
  });
  const scale = colourScale("scale", { seconds: "save", ratio: "phase" }, () => top * data.unit, redraw);
  scale.showEnds();
  redraw();
}
drawn(find("#heat-text"), "Heat map", load);
