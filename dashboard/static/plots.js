// @ts-check
/** What all uPlot charts share: axes in the colours of the page, the size of their holder, and a bar chart. */
import { colour, selectable } from "./canvas.js";

/** The style of an axis. */
export const axisStyle = () => ({
  stroke: () => colour("--dim"),
  grid: { stroke: () => colour("--line"), width: 1 },
  ticks: { stroke: () => colour("--line"), width: 1 },
  font: `12px ${getComputedStyle(document.body).fontFamily}`,
});

/**
 * Keeps a chart as wide as its holder, and in the colours of the scheme that is shown. The label of the holder stands
 * for the chart. Returns what ends that.
 * @param {uPlot} plot @param {HTMLElement} holder
 */
export function keepFitted(plot, holder) {
  plot.root.setAttribute("aria-hidden", "true");
  const fit = () => {
    const width = holder.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: plot.height });
  };
  const observer = new ResizeObserver(fit);
  observer.observe(holder);
  const redraw = () => plot.redraw(true, true);
  document.addEventListener("theme", redraw);
  return () => {
    observer.disconnect();
    document.removeEventListener("theme", redraw);
  };
}

/**
 * @typedef {{
 *   values: number[], fillOf: (bar: number) => string, text: (value: number) => string,
 *   places: number[] | null, labelOf: (place: number) => string, line: number | null,
 * }} Bars
 * `fillOf` names the colour of a bar; `places` are the positions of labels below the bars, where bar 0 is from -0.5
 * to 0.5, null for one below each bar as far as there is room; `line` is the height of a dashed line.
 */

/**
 * A bar chart whose bars can be pointed at, and walked through with the arrow keys.
 * @param {HTMLElement} holder @param {number} height in pixels
 * @param {(bar: number) => void} select is called with the chosen bar, -1 for none
 */
export function barChart(holder, height, select) {
  /** @type {Bars} */
  let bars = { values: [], fillOf: () => "--c0", text: String, places: null, labelOf: String, line: null };
  /** @type {uPlot | null} */
  let plot = null;
  let chosen = -1;

  /** @param {uPlot} u */
  function drawLine(u) {
    if (bars.line === null) return;
    const y = u.valToPos(bars.line, "y", true);
    u.ctx.save();
    u.ctx.strokeStyle = colour("--text");
    u.ctx.setLineDash([5, 4]);
    u.ctx.beginPath();
    u.ctx.moveTo(u.bbox.left, y);
    u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
    u.ctx.stroke();
    u.ctx.restore();
  }

  /** @returns {uPlot} */
  function create() {
    const fills = () => bars.values.map((_, bar) => colour(bar === chosen ? "--text" : bars.fillOf(bar)));
    const paths = uPlot.paths.bars({ size: [0.88, 240], disp: { fill: { unit: 3, values: fills } } });
    /** @type {uPlot.Options} */
    const options = {
      width: holder.clientWidth,
      height,
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false, range: () => [-0.5, bars.values.length - 0.5] },
        y: { range: (_, __, top) => [0, Math.max(top ?? 0, bars.line ?? 0) * 1.06 || 1] },
      },
      axes: [
        {
          ...axisStyle(),
          size: 30,
          grid: { show: false },
          splits: (_, __, low, high, step) => bars.places ?? wholeNumbers(low, high, step),
          values: (_, places) => places.map((place) => bars.labelOf(place)),
        },
        { ...axisStyle(), size: 74, space: 32, values: (_, ticks) => ticks.map((n) => bars.text(n)) },
      ],
      series: [{}, { width: 0, paths, points: { show: false } }],
      hooks: { draw: [drawLine] },
    };
    const created = new uPlot(options, data(), holder);
    keepFitted(created, holder);
    selectable(
      holder,
      {
        count: () => bars.values.length,
        at: (x) => Math.max(-1, Math.min(bars.values.length - 1, Math.round(created.posToVal(x, "x")))),
        select: (bar) => {
          chosen = bar;
          created.redraw(true, false);
          select(bar);
        },
      },
      created.over,
    );
    return created;
  }

  const data = () => [bars.values.map((_, bar) => bar), bars.values];

  /** Shows other bars. @param {Bars} shown */
  return (shown) => {
    bars = shown;
    chosen = -1;
    if (plot) plot.setData(data());
    else plot = create();
  };
}

/** @param {number} low @param {number} high @param {number} step */
function wholeNumbers(low, high, step) {
  const whole = Math.max(1, Math.ceil(step));
  const first = Math.ceil(low / whole) * whole;
  return Array.from({ length: Math.max(0, Math.floor((high - first) / whole) + 1) }, (_, n) => first + n * whole);
}
