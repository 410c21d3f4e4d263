// @ts-check
/** The waterfall of a save with its legend. */
import { api, find, make, numberText, reason } from "./dom.js";
import { legend } from "./canvas.js";
import { noter } from "./tip.js";
import { showWaterfall } from "./waterfall.js";
import { FRAME, WAITS, drawPhase } from "./waterfall_draw.js";

/** Phases that the legend names. */
const NAMED = 24;

/** @param {string[]} phases @param {number[]} paints the colour number of each phase */
function showLegend(phases, paints) {
  const shown = phases.map((name, n) => ({ name, paint: paints[n] })).filter(({ paint }) => paint !== FRAME);
  shown.sort((a, b) => Number(a.paint === WAITS) - Number(b.paint === WAITS));
  const list = find("#phase-legend");
  const entries = shown.slice(0, NAMED).map(({ name, paint }) => ({
    text: paint === WAITS ? `${name} (waiting)` : name,
    draw: (/** @type {CanvasRenderingContext2D} */ g) => drawPhase(g, paint, 0, 0, 13, 13),
  }));
  legend(list, entries);
  if (shown.length > NAMED) list.append(make("li", {}, `and ${numberText(shown.length - NAMED)} more phases`));
}

const holder = find("#waterfall");
const canvas = /** @type {HTMLCanvasElement} */ (find("#waterfall-canvas"));
const note = noter(find("#waterfall .drawing"), find("#waterfall-text"));
const address = `checkpoints/${holder.dataset.checkpoint}/timing`;
const slowest = holder.dataset.slow === "" ? null : Number(holder.dataset.slow);


async function load() {
  try {
    const data = /** @type {import("./waterfall_layout.js").Columns} */ (await api(`${address}/waterfall`));
    showLegend(data.phases, showWaterfall(canvas, data, slowest, note));
  } catch (error) {
    note(`The waterfall cannot be drawn: ${reason(error)}`);
  }
}
load();
