// @ts-check
/** A look at values: a slice is read when a person asks; its numbers, histogram and first values are shown. */
import { api, bytesText, find, make, numberText, reason, recalled, remember } from "./dom.js";
import { colour, follow, selectable } from "./canvas.js";

/** @typedef {{ nan: number, infinite: number, zero: number, minimum: string | null, maximum: string | null, mean: string | null, deviation: string | null, norm: string | null, edges: number[], bins: number[] }} Statistics */
/** @typedef {{ region: string, rank: number | null, top: number, left: number, rows: number, columns: number, elements: number, nbytes: number, read: number, verified: boolean, statistics: Statistics | null, values: string[][], limit: number }} Found */

const map = find("#map");
const form = /** @type {HTMLFormElement} */ (find("#peek"));
const axes = /** @type {HTMLFormElement} */ (find("#axes"));
const state = find("#peek-text");
const holder = find("#peek-found");
const canvas = /** @type {HTMLCanvasElement} */ (find("#peek-canvas"));
const readout = find("#peek-bin");
const LIMIT = 64 << 20;
const NAMES = ["top", "left", "rows", "columns"];
const EDGE = { left: 4, right: 4, top: 8, bottom: 20 };

/** @type {Statistics | null} */
let shown = null;
let chosen = -1;

const short = (/** @type {number} */ n) => Number(n.toPrecision(4)).toString();

/** @param {number} width @param {number} bin */
const left = (width, bin) => EDGE.left + (bin / (shown?.bins.length || 1)) * (width - EDGE.left - EDGE.right);

/** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height */
function draw(g, width, height) {
  g.clearRect(0, 0, width, height);
  if (!shown?.bins.length) return;
  const most = Math.max(...shown.bins), room = height - EDGE.top - EDGE.bottom, floor = height - EDGE.bottom;
  shown.bins.forEach((count, bin) => {
    const x = left(width, bin), h = count ? Math.max(1.5, (count / most) * room) : 0;
    g.fillStyle = colour(bin === chosen ? "--text" : "--c0");
    g.fillRect(x + 0.5, floor - h, Math.max(1, left(width, bin + 1) - x - 1), h);
  });
  g.fillStyle = colour("--line");
  g.fillRect(EDGE.left, floor, width - EDGE.left - EDGE.right, 1);
  g.fillStyle = colour("--dim");
  const { edges } = shown, places = [0, 0.5, 1], aligns = /** @type {CanvasTextAlign[]} */ (["left", "center", "right"]);
  places.forEach((part, at) => { g.textAlign = aligns[at]; g.fillText(short(edges[Math.round(part * (edges.length - 1))]), EDGE.left + part * (width - EDGE.left - EDGE.right), floor + 11); });
}

const redraw = follow(canvas, { height: () => 150, draw });

selectable(canvas, {
  count: () => shown?.bins.length ?? 0,
  at: (x) => Math.max(-1, Math.min((shown?.bins.length ?? 0) - 1, Math.floor(((x - EDGE.left) / (canvas.clientWidth - EDGE.left - EDGE.right)) * (shown?.bins.length ?? 0)))),
  select: (bin) => {
    chosen = bin;
    redraw();
    const text = shown && bin >= 0 ? `${numberText(shown.bins[bin])} values from ${short(shown.edges[bin])} to ${short(shown.edges[bin + 1])}` : "\u00a0";
    readout.textContent = text;
  },
});

/** @param {string} name @param {string} text @param {boolean} [alarm] */
const tile = (name, text, alarm = false) => make("div", { class: alarm ? "tile alarm" : "tile" }, make("dt", {}, name), make("dd", {}, text));

/** @param {Statistics} s */
function numbers(s) {
  const rows = [["min", s.minimum], ["max", s.maximum], ["mean", s.mean], ["std", s.deviation], ["L2 norm", s.norm]].map(([name, text]) => tile(String(name), text ?? "–"));
  return [...rows, tile("zeros", numberText(s.zero)), tile("NaN", numberText(s.nan), s.nan > 0), tile("Inf", numberText(s.infinite), s.infinite > 0)];
}

/** @param {Found} found */
function table(found) {
  const width = found.values[0]?.length ?? 0;
  const head = make("tr", {}, make("td"), ...Array.from({ length: width }, (_, n) => make("th", { scope: "col" }, numberText(found.left + n))));
  const body = found.values.map((row, n) => make("tr", {}, make("th", { scope: "row" }, numberText(found.top + n)), ...row.map((text) => make("td", { class: "mono" }, text))));
  return make("table", { class: "values" }, make("thead", {}, head), make("tbody", {}, ...body));
}

/** @param {Statistics} s */
const bins = (s) => make("table", { class: "small" },
  make("thead", {}, make("tr", {}, make("th", {}, "From"), make("th", {}, "To"), make("th", { class: "n" }, "Values"))),
  make("tbody", {}, ...s.bins.map((count, n) => make("tr", {}, make("td", { class: "mono" }, short(s.edges[n])), make("td", { class: "mono" }, short(s.edges[n + 1])), make("td", { class: "n" }, numberText(count))))));

/** @param {Found} found */
function show(found) {
  const whose = found.rank === null ? "" : ` of rank ${found.rank}`;
  const checked = found.verified ? "checksums match" : "checksums not compared: they cover far more than this slice";
  state.textContent = `${found.region}${whose} · ${numberText(found.elements)} elements, ${bytesText(found.nbytes)} · ${bytesText(found.read)} read, ${checked}`;
  shown = found.statistics;
  chosen = -1;
  holder.hidden = false;
  find("#peek-numbers").replaceChildren(...(shown ? numbers(shown) : []));
  for (const part of ["#peek-drawing", "#peek-bins", "#peek-bin"]) find(part).hidden = !shown?.bins.length;
  if (shown?.bins.length) find("#peek-bins .scroll").replaceChildren(bins(shown));
  find("#peek-values").replaceChildren(table(found));
  redraw();
}

/** @param {boolean} whole */
async function look(whole) {
  const data = new FormData(form), plane = new FormData(axes);
  const view = Object.fromEntries(NAMES.map((name) => [name, String(data.get(name) ?? "").replace(/^0$/, "")]));
  remember({ ...view, peek: whole ? "whole" : "1" });
  state.textContent = "Reading …";
  try {
    show(await api(`checkpoints/${map.dataset.checkpoint}/leaves/${map.dataset.leaf}/peek`, {
      ...(axes.hidden ? {} : { y: String(plane.get("y")), x: String(plane.get("x")), at: plane.getAll("at").map((n) => Number(n) || 0).join(",") }),
      ...(whole ? { whole: "true" } : view),
    }));
  } catch (error) {
    holder.hidden = true;
    state.textContent = `This cannot be shown: ${reason(error)}`;
  }
}

form.addEventListener("submit", (event) => { event.preventDefault(); look(false); });
axes.addEventListener("input", () => { if (!holder.hidden) look(false); });
const whole = find("#peek-whole");
whole.hidden = Number(form.dataset.nbytes) > LIMIT;
whole.addEventListener("click", () => look(true));
for (const name of NAMES) {
  const value = recalled(name);
  if (value !== null && /^[0-9]{1,15}$/.test(value)) /** @type {HTMLInputElement} */ (form.elements.namedItem(name)).value = value;
}
if (recalled("peek")) look(recalled("peek") === "whole");
