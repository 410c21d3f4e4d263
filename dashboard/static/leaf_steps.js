// @ts-check
/** One array over the steps of its run: norm, mean, standard deviation, largest value, and how many are not finite. */
import { api, base, buttonGroup, countText, figure, find, make, numberText } from "./dom.js";
import { drawn, recalled, remember, tableOf } from "./dom.js";
import { stepChart } from "./plots.js";

/**
 * @typedef {{
 *   count: number, nan: number, infinite: number, minimum: number | string | null, maximum: number | string | null,
 *   mean: number | null, deviation: number | null, norm: number | null, largest: number | null,
 * }} Numbers
 */
/**
 * @typedef {{
 *   path: string, ids: string[], leaves: number[], step: number[], numbers: Numbers[], unknown: number,
 * }} Steps
 */

const holder = find("#steps");
const chart = find("#steps-chart");
const readout = find("#steps-text");

/** @type {Record<string, [string, (n: Numbers) => number | null]>} */
const MEASURES = {
  norm: ["norm", (n) => n.norm],
  mean: ["mean", (n) => n.mean],
  deviation: ["std", (n) => n.deviation],
  largest: ["largest value", (n) => n.largest],
  bad: ["NaN or Inf", (n) => n.nan + n.infinite],
};
const orDash = (/** @type {number | null} */ n) => (n === null ? "–" : figure(n, 5));

/** @param {Steps} data @param {number} at */
const addressOf = (data, at) => `${base}checkpoints/${data.ids[at]}/leaves/${data.leaves[at]}`;

/** @param {Steps} data */
function stepsTable(data) {
  const names = Object.values(MEASURES);
  const head = ["Step", ...names.map(([name]) => name)].map((text) => make("th", { scope: "col" }, text));
  const rows = data.step.map((step, at) => [
    make(
      "th",
      { scope: "row" },
      make("a", { href: addressOf(data, at) }, `step ${numberText(step)}`),
    ),
    ...names.map(([, of]) => make("td", { class: "n" }, orDash(of(data.numbers[at])))),
  ]);
  return tableOf("small", head, rows);
}

/** @param {Steps} data */
function draw(data) {
  let measure = recalled("measure") ?? "norm";
  if (!(measure in MEASURES)) measure = "norm";
  const values = () => data.numbers.map((n) => MEASURES[measure][1](n));
  /** @param {number | null} at */
  const tell = (at) => {
    const others = countText(data.unknown, "other checkpoint has", "other checkpoints have");
    const unknown = data.unknown ? `; ${others} no statistics yet` : "";
    readout.textContent =
      at === null
        ? `${countText(data.step.length, "step")}${unknown}`
        : `step ${numberText(data.step[at])} · ${MEASURES[measure][0]} ${orDash(values()[at])}`;
  };
  const asked = { open: (/** @type {number} */ at) => location.assign(addressOf(data, at)), tell, zoom: update };
  const show = stepChart(chart, 215, asked);
  /** @param {number | null} low @param {number | null} high */
  function update(low, high) {
    const line = { label: MEASURES[measure][0], colour: "--c0", values: values() };
    show({ steps: data.step, lines: [line], text: orDash, free: true, low, high });
    tell(null);
  }
  buttonGroup("data-measure", (chosen) => {
    measure = chosen;
    remember({ measure });
    update(null, null);
  })(measure);
  update(null, null);
}

async function start() {
  const { checkpoint, leaf } = holder.dataset;
  const data = /** @type {Steps} */ (await api(`checkpoints/${checkpoint}/leaves/${leaf}/steps`));
  holder.hidden = data.step.length < 2;
  if (holder.hidden) return;
  find("#steps-table").replaceChildren(stepsTable(data));
  draw(data);
}

holder.hidden = false;
drawn(readout, "Steps", start);
