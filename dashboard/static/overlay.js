// @ts-check
/** The page of metrics of several runs: a chart for each metric, with a line for each branch of each run. */
import { api, base, clockText, countText, figure, find, make, numberText } from "./dom.js";
import { reason, recalled, remember } from "./dom.js";
import { axisChoice, nameLines, scaleChoice, stepChart } from "./plots.js";

/**
 * @typedef {{
 *   run: string, metric: string, branch: number, saves: number, ids: string[], step: number[],
 *   created: (number | null)[], values: (number | string)[],
 * }} RunLine
 * @typedef {{ at: number, line: RunLine, n: number }} Point a value of a line, and where it is on the axis
 */

const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c5", "--c4", "--c6", "--c7"];
const readout = find("#overlay-text");
const links = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("a[data-run]")]);
const order = links.map((link) => link.dataset.run ?? "");
const names = new Map(links.map((link) => [link.dataset.run ?? "", link.textContent ?? ""]));
const colourOf = (/** @type {string} */ run) => COLOURS[order.indexOf(run)];
const holders = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("#overlay .chart")]);
const metrics = holders.map((holder) => JSON.parse(holder.dataset.metric ?? '""'));
const numberOf = (/** @type {string} */ name) => (recalled(name) === null ? null : Number(recalled(name)));

/** The steps that are shown, null for all. */
const view = { low: numberOf("low"), high: numberOf("high") };
const byTime = axisChoice(() => redraw().catch(fail));
const isLog = scaleChoice(() => redraw().catch(fail));

/** @param {unknown} error */
function fail(error) {
  readout.textContent = `The charts cannot be drawn: ${reason(error)}`;
}

/** The points of lines from left to right; those without a place on the axis are left out. @param {RunLine[]} lines */
const pointsOf = (lines) =>
  lines
    .flatMap((line) =>
      line.ids.map((_, n) => ({ at: byTime() ? line.created[n] : line.step[n], line, n })),
    )
    .filter((point) => point.at !== null)
    .sort((a, b) => (a.at ?? 0) - (b.at ?? 0));

/** What a value is, in words. @param {number | string} value */
const valueText = (value) => (typeof value === "number" ? figure(value, 5) : value);

/** The lines of each metric that are shown. @type {RunLine[]} */
let shown = [];

/**
 * Runs of which two lines have two neighbouring values in common, by groups; the order in a group is that of the page.
 * Lines that lie on each other only in a part are of one group too. @param {RunLine[]} lines
 */
function runsAlike(lines) {
  /** @type {Map<string, string[]>} */
  const groups = new Map(order.map((run) => [run, [run]]));
  /** @type {Map<string, string>} */
  const runOf = new Map();
  for (const line of lines) {
    const place = (/** @type {number} */ n) => `${byTime() ? line.created[n] : line.step[n]} ${line.values[n]}`;
    const last = line.ids.length - 1;
    for (let n = Math.min(1, last); n <= last; n += 1) {
      const part = `${line.metric} ${place(Math.max(0, n - 1))} ${place(n)}`;
      const [own, other] = [groups.get(line.run), groups.get(runOf.get(part) ?? line.run)];
      if (own && other && own !== other) for (const run of other.splice(0)) groups.set(run, own), own.push(run);
      runOf.set(part, line.run);
    }
  }
  return [...new Set(groups.values())].map((runs) => runs.sort((a, b) => order.indexOf(a) - order.indexOf(b)));
}

/** The groups of runs whose lines lie on each other, of more than one run. @type {string[][]} */
let alike = [];

/** @param {string[]} group of runs */
const namesOf = (group) => group.map((run) => names.get(run)).join(", ");

/** Which of the dashes of its group a run is drawn in; null for one that is drawn as a whole. @param {string} run */
function turnOf(run) {
  const group = alike.find((runs) => runs.includes(run));
  return group ? /** @type {[number, number]} */ ([group.indexOf(run), group.length]) : null;
}

/**
 * The value of each run next to a place on the axis, of the present branch.
 * @param {number} place
 */
function textAt(place) {
  const parts = order.flatMap((run) => {
    const own = shown.filter((line) => line.run === run && line.branch === 0);
    const points = /** @type {Point[]} */ (pointsOf(own));
    if (!points.length) return [];
    const near = points.reduce((best, one) => (Math.abs(one.at - place) < Math.abs(best.at - place) ? one : best));
    const same = points.filter((one) => one.at === near.at);
    const values = same.map(({ line, n }) => `${line.metric} ${valueText(line.values[n])}`);
    return [`${names.get(run)} at step ${numberText(near.line.step[near.n])}: ${values.join(", ")}`];
  });
  return [byTime() ? clockText(place) : `step ${numberText(place)}`, ...parts].join(" · ");
}

const charts = holders.map((holder, number) => {
  /** @type {Point[]} */
  let points = [];
  /** @type {number[]} */
  let places = [];
  const draw = stepChart(holder, 260, {
    open: (at) => {
      const found = points.find((point) => point.at === places[at] && point.line.branch === 0);
      const { line, n } = found ?? /** @type {Point} */ (points.find((point) => point.at === places[at]));
      location.href = `${base}checkpoints/${line.ids[n]}`;
    },
    tell: (at) => {
      readout.textContent = at === null || !places.length ? "\u00a0" : textAt(places[at]);
    },
    zoom,
  });
  return () => {
    const lines = shown.filter((line) => line.metric === metrics[number]);
    lines.sort((a, b) => b.branch - a.branch); // the present branches are in front
    points = /** @type {Point[]} */ (pointsOf(lines));
    places = [...new Set(points.map((point) => point.at))];
    const index = new Map(places.map((place, n) => [place, n]));
    /** @type {(string | null)[]} */
    const marks = places.map(() => null);
    const drawn = lines.map((line) => ({
      label: names.get(line.run) ?? "",
      colour: colourOf(line.run),
      faint: line.branch > 0,
      turn: turnOf(line.run),
      values: /** @type {(number | null | undefined)[]} */ (places.map(() => undefined)),
    }));
    for (const { at, line, n } of points) {
      const place = index.get(at) ?? 0;
      const value = line.values[n];
      drawn[lines.indexOf(line)].values[place] = typeof value === "number" ? value : null;
      if (typeof value === "string") marks[place] = value;
    }
    const [log, time] = [isLog(), byTime()];
    const text = (/** @type {number} */ n) => figure(n, 5);
    // a place has the name of its first save, by which the cursor stays where the axis changes
    const first = new Map(points.toReversed().map(({ at, line, n }) => [at, line.ids[n]]));
    const ids = places.map((place) => first.get(place) ?? "");
    draw({ steps: places, ids, lines: drawn, text, free: true, log, time, marks, low: null, high: null });
  };
});

/** Draws what the view shows. */
async function redraw() {
  const query = { low: view.low, high: view.high, run: order, metric: metrics };
  shown = (await api("overlay/lines", query)).lines;
  alike = runsAlike(shown).filter((runs) => runs.length > 1);
  const drawn = shown.reduce((sum, line) => sum + line.ids.length, 0);
  const saves = shown.reduce((sum, line) => sum + line.saves, 0);
  const untimed = byTime() ? shown.reduce((sum, { created }) => sum + created.filter((t) => t === null).length, 0) : 0;
  const about = [
    drawn < saves
      ? `Of ${countText(saves, "value")} the lowest and the highest of each bin are drawn: ${numberText(drawn)}.`
      : `${countText(saves, "value")}.`,
    ...alike.map((group) => `${namesOf(group)}: lines that lie on each other, in turns.`),
    untimed ? `${countText(untimed, "value")} without a time of saving ${untimed === 1 ? "is" : "are"} left out.` : "",
  ];
  find("#overlay-about").textContent = about.join(" ").trim();
  find("#range-all").toggleAttribute("disabled", view.low === null && view.high === null);
  for (const draw of charts) draw();
  /** @type {import("./plots.js").Sign[]} */
  const list = order.map((run) => ({ label: names.get(run) ?? "", colour: colourOf(run), turn: turnOf(run) }));
  if (shown.some((line) => line.branch > 0)) list.push({ label: "abandoned branches", colour: "--dim", faint: true });
  nameLines(find("#overlay-legend"), list);
}

/**
 * Shows the saves between two places of the axis, or all; charts that follow each other's cursor all ask for it.
 * @param {number | null} low @param {number | null} high
 */
function zoom(low, high) {
  let [from, to] = [low, high];
  if (byTime() && low !== null && high !== null) {
    const points = pointsOf(shown).filter(({ at }) => (at ?? low - 1) >= low && (at ?? low - 1) <= high);
    if (!points.length) return;
    const steps = points.map(({ line, n }) => line.step[n]);
    [from, to] = [Math.min(...steps), Math.max(...steps)];
  }
  [view.low, view.high] = [from === null ? null : Math.floor(from), to === null ? null : Math.ceil(to)];
  remember({ low: view.low, high: view.high });
  requestAnimationFrame(() => redraw().catch(fail));
}

find("#range-all").addEventListener("click", () => zoom(null, null));

links.forEach((link) =>
  link.before(make("span", { class: `swatch ${colourOf(link.dataset.run ?? "").slice(2)}`, "aria-hidden": "true" })),
);
redraw().catch(fail);
