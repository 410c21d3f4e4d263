// @ts-check
/** The page of trends: phases, ranks and figures over the steps of a run. A step leads to the timing of its save. */
import { api, base, bytesText, clockText, countText, figure, find, numberText } from "./dom.js";
import { drawn as drawnOrFailed, reason, recalled, remember, secondsText } from "./dom.js";
import { refresh } from "./live.js";
import { namePhases, paintOf } from "./phases.js";
import { fillName } from "./canvas.js";
import { axisChoice, nameLines, scaleChoice, stepChart } from "./plots.js";
import { binText, rankHeat } from "./rank_heat.js";

/**
 * @typedef {{
 *   ids: string[], step: number[], created: (number | null)[], branch: number[], seconds: (number | null)[],
 *   blocked: (number | null)[], nbytes: number[],
 *   rate: (number | null)[], dedupe: (number | null)[], metrics: Record<string, (number | string | null)[]>,
 *   scan: { complete: boolean },
 * }} Trends
 * @typedef {{
 *   saves: number, ids: string[], step: number[], created: (number | null)[], longest: number[], first: number[],
 *   last: number[],
 *   counts: number[], seconds: number[], phases: string[], waiting: boolean[], stack: number[][], block: number,
 *   world: number, unit: number, work: number[][], lost: number[][], most_lost: number,
 * }} Bins
 * @typedef {import("./plots.js").Line} Line
 * @typedef {import("./plots.js").Shown} Shown
 */

const run = find("#trends").dataset.run;
const readout = find("#trends-text");
/** @param {number} n @param {number} [digits] */
const factor = (n, digits) => `${digits ? figure(n, digits) : n.toFixed(2)}×`;
/** @param {number} n @param {number} [digits] */
const rate = (n, digits) => `${bytesText(n, digits)}/s`;
/** @param {number} n @param {number} [digits] */
const metric = (n, digits = 5) => figure(n, digits);
const numberOf = (/** @type {string} */ name) => (recalled(name) === null ? null : Number(recalled(name)));

/** The steps that are shown, null for all, and how their values are drawn. */
const view = { low: numberOf("low"), high: numberOf("high") };
const byTime = axisChoice(() => redraw().catch(fail));
const isLog = scaleChoice(() => redraw().catch(fail));

const open = (/** @type {string} */ id) => {
  location.href = `${base}checkpoints/${id}/timing`;
};

/** The lines of a chart, and what its values are. @param {Trends} data @param {HTMLElement} holder */
function contents(data, { dataset }) {
  /** @param {string} label @param {(number | null)[]} values @param {string} colour @param {boolean} [dash] */
  const line = (label, values, colour, dash) => ({ label, values, colour, dash });
  if (dataset.metric !== undefined) {
    const name = JSON.parse(dataset.metric);
    const words = data.metrics[name] ?? []; // while the run is read, it may have others
    const values = words.map((n) => (typeof n === "number" ? n : null));
    return { lines: [line(name, values, "--c1")], words, text: metric, free: true };
  }
  switch (dataset.chart) {
    case "rate":
      return { lines: [line("rate", data.rate, "--c2")], text: rate };
    case "nbytes":
      return { lines: [line("bytes", data.nbytes, "--c4")], text: bytesText, whole: true };
    case "dedupe":
      return { lines: [line("dedup ratio", data.dedupe, "--c3")], text: factor };
    default:
      return {
        // of a save in the foreground both are the same
        lines: [
          { ...line("duration", data.seconds, "--c0"), wide: true },
          line("training blocked", data.blocked, "--c5", true),
        ],
        text: secondsText,
      };
  }
}

/**
 * All figures of a save, as a person reads them.
 * @param {Trends} data
 * @param {{ lines: Line[], words?: (number | string | null)[], text: (n: number) => string }[]} charts
 * @param {number} at
 */
function textOf(data, charts, at) {
  const parts = charts.flatMap(({ lines, words, text }) =>
    lines.map(({ label, values }) => {
      const n = words ? words[at] : values[at]; // a word where it is no finite number
      return n === null || n === undefined ? null : `${label} ${typeof n === "string" ? n : text(n)}`;
    }),
  );
  const branch = data.branch[at] ? ["abandoned branch"] : [];
  const saved = data.created[at] === null ? [] : [clockText(data.created[at] ?? 0)];
  const step = `step ${numberText(data.step[at])}`;
  return [step, ...branch, ...saved, ...parts.filter((part) => part !== null)].join(" · ");
}

/**
 * Where each save is on the horizontal axis, null for one whose time is not known.
 * @param {{ step: number[], created: (number | null)[] }} saves
 */
const places = ({ step, created }) => (byTime() ? created : step);

/**
 * The saves that have a place, from left to right. Charts take no two orders: of one place those of abandoned branches
 * come first.
 * @param {Trends} data
 */
function ordered(data) {
  const at = places(data);
  return data.ids
    .map((_, n) => n)
    .filter((n) => at[n] !== null)
    .sort((a, b) => (at[a] ?? 0) - (at[b] ?? 0) || data.branch[b] - data.branch[a]);
}

/**
 * The ends of the axis where the steps of a range are shown.
 * @param {{ step: number[], created: (number | null)[] }} saves
 */
function shownRange(saves) {
  if (!byTime() || (view.low === null && view.high === null)) return { low: view.low, high: view.high };
  const inside = saves.created.filter(
    (_, n) => saves.step[n] >= (view.low ?? -Infinity) && saves.step[n] <= (view.high ?? Infinity),
  );
  const times = /** @type {number[]} */ (inside.filter((time) => time !== null));
  return times.length ? { low: Math.min(...times), high: Math.max(...times) } : { low: null, high: null };
}

/** The number of abandoned branches that are drawn. */
const BRANCHES = 8;

/**
 * A line of the present branch, and one for each abandoned one. Between its saves a line goes on: `undefined` is no
 * save of it, and null one without the value.
 * @param {Trends} data @param {number[]} order @param {Line[]} lines @returns {Line[]}
 */
function byBranch(data, order, lines) {
  const branches = Math.min(BRANCHES, data.branch.reduce((most, n) => Math.max(most, n), 0));
  return lines.flatMap((line) =>
    Array.from({ length: branches + 1 }, (_, n) => branches - n).map((branch) => ({
      ...line,
      colour: branch > 0 ? "--dim" : line.colour,
      faint: branch > 0,
      values: order.map((n) => (data.branch[n] === branch ? line.values[n] : undefined)),
    })),
  );
}

/**
 * Draws the charts of all saves. Returns what draws them.
 * @returns {(data: Trends) => void}
 */
function lineCharts() {
  const holders = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(".chart:not(#phases-chart)")]);
  /** @type {Trends} */
  let data;
  /** @type {ReturnType<typeof contents>[]} */
  let charts = [];
  /** @type {number[]} */
  let order = [];
  const draws = holders.map((holder) =>
    stepChart(holder, 210, {
      open: (at) => open(data.ids[order[at]]),
      tell: (at) => {
        readout.textContent = at === null ? "\u00a0" : textOf(data, charts, order[at]);
      },
      zoom: (low, high) => zoomTo(data)(low, high),
    }),
  );
  return (shown) => {
    data = shown;
    charts = holders.map((holder) => contents(data, holder));
    order = ordered(data);
    const steps = order.map((n) => places(data)[n] ?? 0);
    const ids = order.map((n) => data.ids[n]);
    const common = { steps, ids, log: isLog(), time: byTime(), ...shownRange(data) };
    const faint = { label: "abandoned branches", colour: "--dim", values: [], faint: true };
    draws.forEach((draw, n) => {
      const { words, lines } = charts[n];
      const marks = words && order.map((at) => (typeof words[at] === "string" ? words[at] : null));
      draw({ ...charts[n], ...common, marks, lines: byBranch(data, order, lines) });
      const list = holders[n].parentElement?.querySelector("ul");
      const named = data.branch.some((branch) => branch > 0) ? [...lines, faint] : lines;
      if (list) nameLines(list, named, marks?.some((mark) => mark !== null) ?? false);
    });
  };
}

/** The sums of each phase and those below it, the largest first. @param {Line[]} phases @returns {Line[]} */
function sums(phases) {
  /** @type {number[]} */
  let below = [];
  const lines = phases.map((phase) => {
    below = phase.values.map((seconds, at) => (seconds ?? 0) + (below[at] ?? 0));
    return { ...phase, values: below };
  });
  return lines.reverse();
}

/** The phases of saves as lines, those with stripes or without work as dashed ones. @param {Bins} bins */
const phaseLines = ({ phases, waiting, stack }) =>
  phases.map((label, n) => {
    const paint = paintOf(label, waiting[n]);
    const line = { label, values: stack[n], paint, dash: paint < 0 || fillName(paint) !== `--c${paint}` };
    return { ...line, colour: paint < 0 ? "--dim" : fillName(paint) };
  });

/** Draws the phases of saves in bins. @returns {(bins: Bins) => void} */
function phaseChart() {
  const text = find("#phases-text");
  /** @type {Bins | null} */
  let bins = null;
  const draw = stepChart(find("#phases-chart"), 260, {
    open: (at) => bins && open(bins.ids[at]),
    tell: (at) => {
      text.textContent = at === null || !bins ? "\u00a0" : phasesText(bins, at);
    },
    zoom: (low, high) => bins && zoomTo(bins)(low, high),
  });
  return (shown) => {
    bins = shown;
    const [log, time, apart] = [isLog(), byTime(), phaseLines(bins)];
    const steps = places(bins).map((place) => place ?? 0);
    const axes = { text: secondsText, stacked: !log, log, time, ...shownRange(bins) };
    draw({ steps, ids: bins.ids, lines: log ? apart : sums(apart), ...axes });
    namePhases(
      find("#phases-legend"),
      apart.map(({ label, paint }) => ({ name: label, paint })),
    );
  };
}

/** @param {Bins} bins @param {number} at */
function phasesText(bins, at) {
  const most = `, at most ${secondsText(bins.longest[at])} in step ${numberText(bins.step[at])}`;
  const whole = secondsText(bins.seconds[at]) + (bins.counts[at] > 1 ? ` in the median${most}` : "");
  const parts = bins.phases.map((name, n) => ({ name, seconds: bins.stack[n][at] })).filter((part) => part.seconds);
  parts.sort((a, b) => b.seconds - a.seconds);
  return [`${binText(bins, at)}: ${whole}`, ...parts.map((p) => `${p.name} ${secondsText(p.seconds)}`)].join(" · ");
}

/** @type {Trends | null} */
let trends = null;
const showLines = lineCharts();
const showPhases = phaseChart();
const showRanks = rankHeat(byTime);

/** Draws what the view shows. */
async function redraw() {
  const bins = /** @type {Bins} */ (await api(`runs/${run}/trends/bins`, { low: view.low, high: view.high }));
  find("#bins-about").textContent = aboutBins(bins);
  find("#range-all").toggleAttribute("disabled", view.low === null && view.high === null);
  showPhases(bins);
  showRanks(bins);
  if (trends) showLines(trends);
}

/** @param {Bins} bins */
function aboutBins({ saves, counts }) {
  if (!saves) return "No save in this range has timings.";
  return `${countText(saves, "save")}${counts[0] > 1 ? `, ${numberText(counts[0])} in each bin` : ""}`;
}

let asked = false;

/**
 * Shows the steps of a range; charts that follow each other's cursor all ask for it.
 * @param {number | null} low @param {number | null} high
 */
function zoom(low, high) {
  if (asked) return;
  asked = true;
  [view.low, view.high] = [low === null ? null : Math.floor(low), high === null ? null : Math.ceil(high)];
  remember({ low: view.low, high: view.high, start: null });
  refresh(); // the tables
  requestAnimationFrame(() => {
    asked = false;
    redraw().catch(fail);
  });
}

/**
 * What shows the saves between two places of the axis.
 * @param {{ step: number[], created: (number | null)[] }} saves
 * @returns {(low: number | null, high: number | null) => void}
 */
const zoomTo = (saves) => (low, high) => {
  if (!byTime() || low === null || high === null) return zoom(low, high);
  const inside = saves.step.filter((_, n) => (saves.created[n] ?? -1) >= low && (saves.created[n] ?? -1) <= high);
  if (inside.length) zoom(Math.min(...inside), Math.max(...inside));
};

/** @param {unknown} error */
function fail(error) {
  readout.textContent = `The charts cannot be drawn: ${reason(error)}`;
}

for (const button of document.querySelectorAll("button[data-last]"))
  button.addEventListener("click", () => {
    const steps = trends?.step.filter((_, n) => trends?.branch[n] === 0) ?? [];
    const count = Number(button.getAttribute("data-last"));
    if (steps.length > count) zoom(steps[steps.length - count], steps[steps.length - 1]);
    else zoom(null, null);
  });
find("#range-all").addEventListener("click", () => zoom(null, null));

/** The metrics that have a chart. */
const shownMetrics = [...document.querySelectorAll("[data-metric]")].map((holder) =>
  JSON.parse(/** @type {HTMLElement} */ (holder).dataset.metric ?? ""),
);
/** What the list of saves was when they were read. @type {string | undefined} */
let version;
let loading = false;

/** Reads all saves, and draws what the view shows. */
async function load() {
  if (loading) return;
  loading = true;
  try {
    version = find("#trends-news").dataset.version;
    trends = /** @type {Trends} */ (await api(`runs/${run}/trends`));
    const others = trends.scan.complete && Object.keys(trends.metrics).some((name) => !shownMetrics.includes(name));
    if (others || (trends.ids.length && find("#trends").hidden)) location.reload();
    else if (trends.ids.length) await redraw();
  } finally {
    loading = false;
  }
}

document.addEventListener("taken", () => {
  if (find("#trends-news").dataset.version !== version) load().catch(fail);
});
// a page of the table, without the others
document.addEventListener("click", (event) => {
  const link = event.target instanceof Element ? event.target.closest("#steps .pager a") : null;
  if (!link || event.defaultPrevented) return;
  event.preventDefault();
  remember({ start: new URL(/** @type {HTMLAnchorElement} */ (link).href).searchParams.get("start") });
  refresh();
});

drawnOrFailed(readout, "Charts", load);
