// @ts-check
/** Values of an array: a slice is read on demand; its statistics, histogram and first values are shown. */
import { api, bytesText, countText, figure, find, make, numberText } from "./dom.js";
import { drawn, recalled, remember, tableOf } from "./dom.js";
import { numbersColumn } from "./columns.js";
import { showPicture } from "./leaf_image.js";
import { barChart } from "./plots.js";

/**
 * @typedef {{
 *   nan: number, infinite: number, zero: number, minimum: string | null, maximum: string | null,
 *   mean: string | null, deviation: string | null, norm: string | null, edges: number[], bins: number[],
 * }} Statistics
 */
/**
 * @typedef {{
 *   region: string, rank: number | null, top: number, left: number, rows: number, columns: number,
 *   elements: number, nbytes: number, read: number, verified: boolean, statistics: Statistics | null,
 *   values: string[][], limit: number, image: import("./leaf_image.js").Picture | null,
 * }} Found
 */

const map = find("#map");
const form = /** @type {HTMLFormElement} */ (find("#peek"));
const axes = /** @type {HTMLFormElement} */ (find("#axes"));
const state = find("#peek-text");
const holder = find("#peek-found");
const readout = find("#peek-bin");
const LIMIT = 64 << 20;
const NAMES = ["top", "left", "rows", "columns"];

/** @type {Statistics | null} */
let shown = null;
const drawHistogram = barChart(find("#peek-chart"), 180, (bin) => {
  readout.textContent = shown && bin >= 0 ? binText(shown, bin) : "\u00a0";
});

/** @param {Statistics} statistics @param {number} bin */
const binText = ({ bins, edges }, bin) =>
  `${countText(bins[bin], "value")} from ${figure(edges[bin], 4)} to ${figure(edges[bin + 1], 4)}`;

/** @param {Statistics} statistics */
function showHistogram({ bins, edges }) {
  const edgeAt = (/** @type {number} */ place) => edges[Math.round(place + 0.5)];
  drawHistogram({
    values: bins,
    fillOf: () => "--c0",
    text: numberText,
    places: [0, 0.25, 0.5, 0.75, 1].map((part) => Math.round(part * bins.length) - 0.5),
    labelOf: (place) => figure(edgeAt(place), 4),
    line: null,
  });
}

/** @param {string} name @param {string} text @param {boolean} [alarm] */
const tile = (name, text, alarm = false) =>
  make("div", { class: alarm ? "tile alarm" : "tile" }, make("dt", {}, name), make("dd", {}, text));

/** @param {Statistics} s */
function numbers(s) {
  const rows = [
    ["min", s.minimum],
    ["max", s.maximum],
    ["mean", s.mean],
    ["std", s.deviation],
    ["L2 norm", s.norm],
  ].map(([name, text]) => tile(String(name), text ?? "–"));
  return [
    ...rows,
    tile("zeros", numberText(s.zero)),
    tile("NaN", numberText(s.nan), s.nan > 0),
    tile("Inf", numberText(s.infinite), s.infinite > 0),
  ];
}

/** @param {Found} found */
function valuesTable({ left, top, values }) {
  const columns = Array.from(values[0] ?? [], (_, n) => make("th", { scope: "col" }, numberText(left + n)));
  const rows = values.map((row, n) => [
    make("th", { scope: "row" }, numberText(top + n)),
    ...row.map((text) => make("td", { class: "mono" }, text)),
  ]);
  return tableOf("values", [make("td"), ...columns], rows);
}

/** @param {Statistics} statistics */
function binsTable({ bins, edges }) {
  const head = ["From", "To", "Values"].map((text) => make("th", { class: "n" }, text));
  const edge = numbersColumn(edges, 4);
  const rows = bins.map((count, n) => [
    make("td", { class: "n" }, edge(edges[n])),
    make("td", { class: "n" }, edge(edges[n + 1])),
    make("td", { class: "n" }, numberText(count)),
  ]);
  return tableOf("small", head, rows);
}

/** @param {Found} found */
function show(found) {
  const whose = found.rank === null ? "" : ` of rank ${found.rank}`;
  const why = map.hasAttribute("data-foreign") ? "the format has none for parts" : "they cover more than this slice";
  const checked = found.verified ? "checksums match" : `checksums not compared: ${why}`;
  const size = `${countText(found.elements, "element")}, ${bytesText(found.nbytes)}`;
  state.textContent = `${found.region}${whose} · ${size} · ${bytesText(found.read)} read, ${checked}`;
  shown = found.statistics;
  holder.hidden = false;
  find("#peek-numbers").replaceChildren(...(shown ? numbers(shown) : []));
  for (const part of ["#peek-chart", "#peek-bins", "#peek-bin"]) find(part).hidden = !shown?.bins.length;
  readout.textContent = "\u00a0";
  if (shown?.bins.length) {
    find("#peek-bins .scroll").replaceChildren(binsTable(shown));
    showHistogram(shown);
  }
  showPicture(found);
  find("#peek-values").replaceChildren(valuesTable(found));
}

/** The plane that the axis pickers of the map choose. */
function plane() {
  const data = new FormData(axes);
  const at = data.getAll("at").map((n) => Number(n) || 0);
  return { y: String(data.get("y")), x: String(data.get("x")), at: at.join(",") };
}

/** @param {string} what @param {Record<string, string>} view */
const asked = (what, view) =>
  what === "whole" ? { whole: "true" } : what === "region" ? { region: map.dataset.region ?? "" } : view;

/** Reads and shows a slice, or "whole", or the chosen "region". @param {string} what */
async function look(what) {
  const data = new FormData(form);
  const view = Object.fromEntries(NAMES.map((name) => [name, String(data.get(name) ?? "").replace(/^0$/, "")]));
  remember({ ...view, peek: what });
  const query = { ...(axes.hidden ? {} : plane()), ...asked(what, view) };
  await drawn(state, "Values", async () => {
    holder.hidden = true;
    show(await api(`checkpoints/${map.dataset.checkpoint}/leaves/${map.dataset.leaf}/peek`, query));
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  look("1");
});
axes.addEventListener("input", () => {
  if (!holder.hidden) look("1");
});
const whole = find("#peek-whole");
whole.hidden = Number(form.dataset.nbytes) > LIMIT;
whole.addEventListener("click", () => look("whole"));
for (const name of NAMES) {
  const value = recalled(name);
  if (value !== null && /^[0-9]{1,15}$/.test(value))
    /** @type {HTMLInputElement} */ (form.elements.namedItem(name)).value = value;
}
document.querySelector("#peek-region")?.addEventListener("click", () => look("region"));
const last = recalled("peek");
if (last) look(last === "region" && !map.dataset.region ? "1" : last);
