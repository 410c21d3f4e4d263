// @ts-check
/** Lines over the steps of a run: time, rate, bytes. A step leads to the timing of its save. */
import { api, base, bytesText, find, numberText, reason, secondsText } from "./dom.js";
import { colour, legend } from "./canvas.js";
import { axisStyle, keepFitted } from "./plots.js";

/**
 * @typedef {{
 *   ids: string[], step: number[], seconds: (number | null)[], blocked: (number | null)[], nbytes: number[],
 *   rate: (number | null)[], dedupe: (number | null)[], metrics: Record<string, (number | null)[]>,
 * }} Trends
 */
const readout = find("#trends-text");
const percent = (/** @type {number} */ n) => `${Math.round(n * 100)} %`;
const rate = (/** @type {number} */ n) => `${bytesText(n)}/s`;

const figure = (/** @type {number} */ n) => String(Number(n.toPrecision(5)));

/**
 * What a chart shows: lines of a label, the name of the values and a colour; `max` is the end of the axis, which begins
 * at zero unless `free`.
 * @typedef {{
 *   lines: [string, string, string][], text: (n: number) => string, max?: number, free?: boolean,
 * }} Shown
 * @type {Record<string, Shown>}
 */
const CHARTS = {
  time: {
    lines: [
      ["duration", "seconds", "--c0"],
      ["training blocked", "blocked", "--c5"],
    ],
    text: secondsText,
  },
  rate: { lines: [["rate", "rate", "--c2"]], text: rate },
  nbytes: { lines: [["bytes", "nbytes", "--c4"]], text: bytesText },
  dedupe: { lines: [["dedup ratio", "dedupe", "--c3"]], text: percent, max: 1 },
};

/** @param {string} name @returns {Shown} */
const shownMetric = (name) => ({ lines: [[name, name, "--c1"]], text: figure, free: true });

/** The ends of an axis with some room around its values. @param {number | null} low @param {number | null} top */
function around(low, top) {
  const room = ((top ?? 1) - (low ?? 0)) * 0.1 || Math.abs(top ?? 0) * 0.1 || 1;
  return /** @type {[number, number]} */ ([(low ?? 0) - room, (top ?? 1) + room]);
}

/** The values of a line. @param {Trends} data @param {string} key @param {Shown} shown */
const valuesOf = (data, key, shown) =>
  shown.free ? data.metrics[key] : /** @type {Record<string, any>} */ (data)[key];

/** @param {Trends} data @param {number} at */
function textOf(data, at) {
  const all = [...Object.values(CHARTS), ...Object.keys(data.metrics).map(shownMetric)];
  const parts = all.flatMap((shown) =>
    shown.lines.map(([name, key]) => {
      const n = /** @type {number | null} */ (valuesOf(data, key, shown)[at]);
      return n === null ? null : `${name} ${shown.text(n)}`;
    }),
  );
  return `step ${numberText(data.step[at])} · ${parts.filter((part) => part !== null).join(" · ")}`;
}

/** @param {HTMLElement} holder @param {Trends} data */
function chart(holder, data) {
  const { metric } = holder.dataset;
  const shown = metric === undefined ? CHARTS[holder.dataset.chart ?? "time"] : shownMetric(JSON.parse(metric));
  const { lines, text, max } = shown;
  const axis = axisStyle();
  const open = (/** @type {number | null | undefined} */ at) => {
    if (at !== null && at !== undefined) location.href = `${base}checkpoints/${data.ids[at]}/timing`;
  };
  const plot = new uPlot(
    {
      width: holder.clientWidth,
      height: 210,
      scales: {
        x: { time: false },
        y: {
          range: (_, low, top) => (shown.free ? around(low, top) : [0, max ?? (top ? top * 1.08 : 1)]),
        },
      },
      legend: { show: false },
      cursor: {
        y: false,
        points: { size: 9 },
        drag: { x: true, y: false },
        sync: { key: "steps", setSeries: false },
      },
      axes: [
        {
          ...axis,
          values: (_, steps) => steps.map((n) => (Number.isInteger(n) ? numberText(n) : "")),
        },
        {
          ...axis,
          size: 74,
          values: (_, ticks) => ticks.map((n) => text(n)),
        },
      ],
      series: [
        { label: "step" },
        ...lines.map(([label, , stroke], n) => ({
          label,
          stroke: () => colour(stroke),
          width: 2,
          dash: n ? [7, 5] : [],
          points: { show: data.step.length < 60, size: 6, fill: () => colour(stroke) },
        })),
      ],
      hooks: {
        setCursor: [
          (u) => {
            const at = u.cursor.idx;
            readout.textContent = at === null || at === undefined ? "\u00a0" : textOf(data, at);
          },
        ],
      },
    },
    [data.step, ...lines.map(([, key]) => /** @type {(number | null)[]} */ (valuesOf(data, key, shown)))],
    holder,
  );

  const list = holder.parentElement?.querySelector("ul");
  if (list) {
    legend(
      list,
      lines.map(([label, , stroke]) => ({
        text: label,
        draw: (/** @type {CanvasRenderingContext2D} */ g) => {
          g.fillStyle = colour(stroke);
          g.fillRect(0, 5, 13, 3);
        },
      })),
    );
  }
  let from = 0;
  plot.over.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
    from = event.clientX;
  });
  plot.over.addEventListener("click", (/** @type {PointerEvent} */ event) => {
    if (Math.abs(event.clientX - from) < 4) open(plot.cursor.idx);
  });
  holder.addEventListener("keydown", (event) => {
    const last = data.step.length - 1;
    const at = plot.cursor.idx;
    /** @type {Record<string, number>} */
    const steps = {
      ArrowRight: Math.min(last, (at ?? -1) + 1),
      ArrowLeft: Math.max(0, (at ?? last + 1) - 1),
      Home: 0,
      End: last,
    };
    if (event.key === "Enter") {
      open(at);
      return;
    }
    if (!(event.key in steps)) return;
    event.preventDefault();
    plot.setCursor({ left: plot.valToPos(data.step[steps[event.key]], "x"), top: 20 });
  });
  keepFitted(plot, holder);
}

async function start() {
  const data = /** @type {Trends} */ (await api(`runs/${find("#trends").dataset.run}/trends`));
  for (const holder of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".chart")))
    chart(holder, data);
}

start().catch((error) => {
  readout.textContent = `The lines cannot be drawn: ${reason(error)}`;
});
