// @ts-check
/** The page of trends: phases, ranks and figures over the steps of a run. A step leads to the timing of its save. */
import { api, base, buttonGroup, bytesText, countText, figure, find, numberText } from "./dom.js";
import { drawn as drawnOrFailed, reason, recalled, remember, secondsText } from "./dom.js";
import { binText, rankHeat } from "./rank_heat.js";
import { nameLines, stepChart } from "./plots.js";

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
 *   counts: number[], seconds: number[], phases: string[], stack: number[][], block: number, world: number,
 *   unit: number, work: number[][], times: number[][],
 * }} Bins
 * @typedef {import("./plots.js").Line} Line
 * @typedef {import("./plots.js").Shown} Shown
 */

/** Milliseconds after which a page of a run that is still being read is loaded again. */
const AGAIN = 2000;
/** The colours of phases, the longest first; the last is for all others. */
const PHASES = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];

const run = find("#trends").dataset.run;
const readout = find("#trends-text");
const factor = (/** @type {number} */ n) => `${n.toFixed(2)}×`;
const rate = (/** @type {number} */ n) => `${bytesText(n)}/s`;
const numberOf = (/** @type {string} */ name) => (recalled(name) === null ? null : Number(recalled(name)));

/** The steps that are shown, null for all, how their values are drawn, and whether by the time of saving. */
const view = {
  low: numberOf("low"),
  high: numberOf("high"),
  log: recalled("axis") === "log",
  time: recalled("by") === "time",
};

const open = (/** @type {string} */ id) => {
  location.href = `${base}checkpoints/${id}/timing`;
};

/** The lines of a chart, and what its values are. @param {Trends} data @param {HTMLElement} holder */
function contents(data, { dataset }) {
  /** @param {string} label @param {(number | null)[]} values @param {string} colour @param {boolean} [dash] */
  const line = (label, values, colour, dash) => ({ label, values, colour, dash });
  if (dataset.metric !== undefined) {
    const name = JSON.parse(dataset.metric);
    const words = data.metrics[name];
    const values = words.map((n) => (typeof n === "number" ? n : null));
    return { lines: [line(name, values, "--c1")], words, text: (/** @type {number} */ n) => figure(n, 5), free: true };
  }
  switch (dataset.chart) {
    case "rate":
      return { lines: [line("rate", data.rate, "--c2")], text: rate };
    case "nbytes":
      return { lines: [line("bytes", data.nbytes, "--c4")], text: bytesText };
    case "dedupe":
      return { lines: [line("dedup ratio", data.dedupe, "--c3")], text: factor };
    default:
      return {
        lines: [line("duration", data.seconds, "--c0"), line("training blocked", data.blocked, "--c5", true)],
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

/** A Unix time to the second. @param {number} seconds */
const clockText = (seconds) => `${new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;

/**
 * Where each save is on the horizontal axis, null for one whose time is not known.
 * @param {{ step: number[], created: (number | null)[] }} saves
 */
const places = ({ step, created }) => (view.time ? created : step);

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
  if (!view.time || (view.low === null && view.high === null)) return { low: view.low, high: view.high };
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
      faint: branch > 0,
      values: order.map((n) => (data.branch[n] === branch ? line.values[n] : undefined)),
    })),
  );
}

/** Draws the charts of all saves. Returns what draws them again. @param {Trends} data */
function drawLines(data) {
  const holders = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(".chart:not(#phases-chart)")]);
  const charts = holders.map((holder) => contents(data, holder));
  const draws = holders.map((holder) =>
    stepChart(holder, 210, {
      open: (at) => open(data.ids[order[at]]),
      tell: (at) => {
        readout.textContent = at === null ? "\u00a0" : textOf(data, charts, order[at]);
      },
      zoom: zoomTo(data),
    }),
  );
  /** @type {number[]} */
  let order = [];
  const list = holders[0].parentElement?.querySelector("ul");
  const abandoned = data.branch.some((n) => n > 0) ? [{ label: "abandoned branches", colour: "--dim" }] : [];
  if (list) nameLines(list, [...charts[0].lines, ...abandoned]);
  return () => {
    order = ordered(data);
    const steps = order.map((n) => places(data)[n] ?? 0);
    const shown = { steps, log: view.log, time: view.time, ...shownRange(data) };
    draws.forEach((draw, n) => {
      const { words, lines } = charts[n];
      const marks = words && order.map((at) => (typeof words[at] === "string" ? words[at] : null));
      draw({ ...charts[n], ...shown, marks, lines: byBranch(data, order, lines) });
    });
  };
}

/** The sums of each phase and those below it, the largest first. @param {Bins} bins @returns {Line[]} */
function sums({ phases, stack }) {
  /** @type {number[]} */
  let below = [];
  const lines = phases.map((label, n) => {
    below = stack[n].map((seconds, at) => seconds + (below[at] ?? 0));
    return { label, colour: PHASES[n], values: below };
  });
  return lines.reverse();
}

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
    const apart = bins.phases.map((label, n) => ({ label, colour: PHASES[n], values: shown.stack[n] }));
    const lines = view.log ? apart : sums(bins);
    const steps = places(bins).map((place) => place ?? 0);
    const { log, time } = view;
    draw({ steps, lines, text: secondsText, stacked: !log, log, time, ...shownRange(bins) });
    nameLines(find("#phases-legend"), apart);
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

/** @type {(() => void) | null} */
let drawn = null;
/** @type {Trends | null} */
let trends = null;
const showPhases = phaseChart();
const showRanks = rankHeat();

/** Draws what the view shows. */
async function redraw() {
  const bins = /** @type {Bins} */ (await api(`runs/${run}/trends/bins`, { low: view.low, high: view.high }));
  find("#bins-about").textContent = aboutBins(bins);
  find("#range-all").toggleAttribute("disabled", view.low === null && view.high === null);
  showPhases(bins);
  showRanks(bins);
  drawn?.();
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
  remember({ low: view.low, high: view.high });
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
  if (!view.time || low === null || high === null) return zoom(low, high);
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
buttonGroup("data-axis", (value) => {
  view.log = value === "log";
  remember({ axis: view.log ? value : null });
  redraw().catch(fail);
})(view.log ? "log" : "linear");

buttonGroup("data-by", (value) => {
  view.time = value === "time";
  remember({ by: view.time ? value : null });
  redraw().catch(fail);
})(view.time ? "time" : "step");

async function start() {
  trends = /** @type {Trends} */ (await api(`runs/${run}/trends`));
  drawn = drawLines(trends);
  await redraw();
  if (!trends.scan.complete)
    setInterval(() => {
      if (!document.hidden) location.reload();
    }, AGAIN);
}

drawnOrFailed(readout, "Charts", start);
