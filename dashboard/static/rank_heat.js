// @ts-check
/** The heat map of trends: the work of each rank in each save of a run. */
import { base, clockText, find, numberText, secondsText } from "./dom.js";
import { noter } from "./canvas.js";
import { LEFT, colourScale, heatGrid, lostText } from "./heat_grid.js";

/** @typedef {import("./trends.js").Bins} Bins */

/** The saves of a bin, as a person reads them. @param {Bins} bins @param {number} at */
export const binText = (bins, at) =>
  bins.counts[at] === 1
    ? `step ${numberText(bins.step[at])}`
    : `steps ${numberText(bins.first[at])} to ${numberText(bins.last[at])}, ${numberText(bins.counts[at])} saves`;

/** The ranks of a line. @param {Bins} bins @param {number} line */
function ranksText({ block, world }, line) {
  const last = Math.min(world, (line + 1) * block) - 1;
  return last === line * block ? `rank ${last}` : `ranks ${line * block} to ${last}`;
}

/**
 * Writes steps, or times, below their columns, as many as there is room for.
 * @param {CanvasRenderingContext2D} g @param {Bins} bins @param {number} cw @param {number} bottom
 * @param {boolean} time
 */
function drawSteps(g, bins, cw, bottom, time) {
  g.textAlign = "left";
  g.fillText(time ? "UTC" : "step", 6, bottom + 12);
  let free = LEFT;
  bins.step.forEach((step, c) => {
    const at = bins.created[c];
    if (time && at === null) return;
    const text = time ? clockText(at ?? 0).slice(0, 16) : numberText(step);
    const half = g.measureText(text).width / 2;
    const x = Math.max(LEFT + half, LEFT + (c + 0.5) * cw);
    if (x - half < free || x + half > LEFT + cw * bins.step.length + 8) return;
    g.textAlign = "center";
    g.fillText(text, x, bottom + 12);
    free = x + half + 46;
  });
}

/** Returns what shows other saves. @param {() => boolean} byTime @returns {(bins: Bins) => void} */
export function rankHeat(byTime) {
  const canvas = /** @type {HTMLCanvasElement} */ (find("#ranks-canvas"));
  const note = noter(find("#ranks-heat .drawing"), find("#ranks-text"));
  /** @type {Bins | null} */
  let bins = null;
  let version = 0;
  const lines = () => bins?.work[0]?.length ?? 0;
  const top = () => (bins?.work ?? []).reduce((most, column) => column.reduce((m, n) => Math.max(m, n), most), 1);
  let most = 1;
  const redraw = heatGrid(canvas, note, {
    values: () => (scale.all() ? bins?.work : bins?.lost) ?? [],
    stops: () => scale.stops(),
    share: (n) => n / (scale.all() ? most : (bins?.most_lost ?? 1)),
    state: () => `${scale.all()} ${version}`,
    body: () => Math.max(60, Math.min(340, lines() * 24)),
    head: () => 4,
    foot: 24,
    rowLabel: (r) => (bins && bins.block > 1 ? numberText(r * bins.block) : `rank ${r}`),
    drawColumns: (g, cw, _, bottom) => bins && drawSteps(g, bins, cw, bottom, byTime()),
    textOf: (r, c) => {
      if (!bins) return "";
      const time = bins.work[c][r];
      if (time < 0) return `${binText(bins, c)} · ${ranksText(bins, r)} · no timings`;
      const at = bins.counts[c] > 1 || bins.block > 1 ? "at most " : "";
      const lost = lostText(bins.lost[c][r] * bins.unit);
      return `${binText(bins, c)} · ${ranksText(bins, r)} · ${at}${secondsText(time * bins.unit)}${lost}`;
    },
    open: (_, c) => {
      if (bins) location.href = `${base}checkpoints/${bins.ids[c]}/timing`;
    },
  });
  const seconds = (/** @type {number} */ n) => n * (bins?.unit ?? 1);
  const ends = { lost: () => seconds(bins?.most_lost ?? 1), longest: () => seconds(most) };
  const scale = colourScale("work", ends, redraw);
  return (shown) => {
    bins = shown;
    version += 1;
    most = top();
    scale.showEnds();
    redraw();
  };
}
