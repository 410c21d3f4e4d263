// @ts-check
/** The bytes that each rank wrote, as a bar chart. */
import { api, bytesText, countText, drawn, find } from "./dom.js";
import { colour, legend } from "./canvas.js";
import { barChart } from "./plots.js";

/** @typedef {{ ranks: number[], nbytes: number[], mean: number }} Balance */

const holder = find("#balance-chart");
const readout = find("#balance-text");

/** @param {Balance} balance */
function show({ ranks, nbytes, mean }) {
  const count = countText(ranks.length, "rank");
  const summary = `${count}; the line is the mean, ${bytesText(mean)}`;
  const draw = barChart(holder, 170, (bar) => {
    const times = (nbytes[bar] / (mean || 1)).toFixed(2);
    readout.textContent =
      bar < 0 ? summary : `rank ${ranks[bar]} wrote ${bytesText(nbytes[bar])}, ${times}× the mean`;
  });
  draw({
    values: nbytes,
    fillOf: (bar) => (nbytes[bar] > 1.2 * mean ? "--c5" : "--c0"),
    text: bytesText,
    places: null,
    labelOf: (place) => String(ranks[place] ?? ""),
    line: mean,
  });
  readout.textContent = summary;
}

/** @param {string} fill @returns {(g: CanvasRenderingContext2D) => void} */
const filled = (fill) => (g) => {
  g.fillStyle = colour(fill);
  g.fillRect(0, 0, 13, 13);
};

drawn(readout, "Chart", async () => {
  show(/** @type {Balance} */ (await api(`checkpoints/${find("#strips").dataset.checkpoint}/balance`)));
  legend(find("#balance-legend"), [
    { text: "bytes of a rank", draw: filled("--c0") },
    { text: "more than 1.2× the mean", draw: filled("--c5") },
  ]);
});
