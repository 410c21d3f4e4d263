// @ts-check
/** One array over the steps of its run: norm, mean, standard deviation, largest value, and how many are not finite. */
import { api, base, buttonGroup, clockText, countText, figure, find, make, numberText } from "./dom.js";
import { drawn, recalled, remember, tableOf } from "./dom.js";
import { numbersColumn } from "./columns.js";
import { axisChoice, stepChart } from "./plots.js";

/**
 * @typedef {{
 *   count: number, nan: number, infinite: number, minimum: number | string | null, maximum: number | string | null,
 *   mean: number | null, deviation: number | null, norm: number | null, largest: number | null,
 * }} Numbers
 */
/**
 * @typedef {{
 *   path: string, ids: string[], leaves: number[], step: number[], created: (number | null)[], numbers: Numbers[],
 *   unknown: number,
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
/** @param {number | null} n @param {number} [digits] */
const orDash = (n, digits = 5) => (n === null ? "–" : figure(n, digits));
/** When a step was saved; empty if that is not known. @param {Steps} data @param {number} at */
const savedText = ({ created }, at) => (created[at] === null ? "" : clockText(created[at] ?? 0));

/** @param {Steps} data @param {number} at */
const addressOf = (data, at) => `${base}checkpoints/${data.ids[at]}/leaves/${data.leaves[at]}`;

/** @param {Steps} data */
function stepsTable(data) {
  const measures = Object.values(MEASURES).map(([name, of]) => {
    const values = data.numbers.map(of);
    return { name, values, text: numbersColumn(values) };
  });
  const heads = ["Step", "Saved", ...measures.map(({ name }) => name)];
  const head = heads.map((text, n) => make("th", { scope: "col", class: n > 1 ? "n" : null }, text));
  const rows = data.step.map((step, at) => [
    make(
      "th",
      { scope: "row" },
      make("a", { href: addressOf(data, at) }, `step ${numberText(step)}`),
    ),
    make("td", {}, savedText(data, at) || "–"),
    ...measures.map(({ values, text }) => make("td", { class: "n" }, text(values[at] ?? "–"))),
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
        : [`step ${numberText(data.step[at])}`, savedText(data, at), `${MEASURES[measure][0]} ${orDash(values()[at])}`]
            .filter(Boolean)
            .join(" · ");
  };
  /** The places of the steps that have one, from left to right. @type {number[]} */
  let order = [];
  const place = (/** @type {number} */ at) => (byTime() ? data.created[at] : data.step[at]);
  const asked = {
    open: (/** @type {number} */ at) => location.assign(addressOf(data, order[at])),
    tell: (/** @type {number | null} */ at) => tell(at === null ? null : order[at]),
    zoom: update,
  };
  const show = stepChart(chart, 215, asked);
  const byTime = axisChoice(() => update(null, null));
  /** @param {number | null} low @param {number | null} high */
  function update(low, high) {
    const time = byTime();
    order = [...data.step.keys()].filter((at) => place(at) !== null);
    order.sort((a, b) => (place(a) ?? 0) - (place(b) ?? 0));
    const line = { label: MEASURES[measure][0], colour: "--c0", values: order.map((at) => values()[at]) };
    const steps = order.map((at) => place(at) ?? 0);
    const ids = order.map((at) => data.ids[at]);
    tell(null);
    show({ steps, ids, lines: [line], text: orDash, free: true, whole: measure === "bad", time, low, high });
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
