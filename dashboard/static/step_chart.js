// @ts-check
/** A chart of lines or stacked areas over the steps of a run. */
import { numberText } from "./dom.js";
import { colour, legend } from "./canvas.js";
import { axisStyle, keepFitted } from "./plots.js";

/**
 * What a chart shows. `stacked` lines are sums, the largest first, filled down to zero; `max` is the end of the axis,
 * which begins at zero unless `free` or `log`.
 * @typedef {{ label: string, colour: string, values: (number | null)[], dash?: boolean }} Line
 * @typedef {{
 *   steps: number[], lines: Line[], text: (n: number) => string, stacked?: boolean, max?: number, free?: boolean,
 *   log?: boolean, low: number | null, high: number | null,
 * }} Shown
 */

/**
 * What a chart is asked for: to open a save, to tell of the one under the cursor, to show the steps of a range, or all.
 * @typedef {{
 *   open: (at: number) => void, tell: (at: number | null) => void,
 *   zoom: (low: number | null, high: number | null) => void,
 * }} Asked
 */

/** The ends of an axis with some room around its values. @param {number | null} low @param {number | null} top */
function around(low, top) {
  const room = ((top ?? 1) - (low ?? 0)) * 0.1 || Math.abs(top ?? 0) * 0.1 || 1;
  return /** @type {[number, number]} */ ([(low ?? 0) - room, (top ?? 1) + room]);
}

/**
 * The ends of the axis of values; 10 units where all are zero, since texts of bytes have no fractions.
 * @param {Shown} shown @param {number | null} low @param {number | null} top @returns {[number, number]}
 */
function ends(shown, low, top) {
  if (shown.log) return [(low || 1e-3) / 1.3, (top || 1) * 1.3];
  return shown.free ? around(low, top) : [0, shown.max ?? (top ? top * 1.08 : 10)];
}

/** Marks of a logarithmic axis that have a text: powers of ten, of short axes also their doubles and fives. */
const marked = (/** @type {number[]} */ ticks) => {
  const short = ticks.length && ticks[ticks.length - 1] / ticks[0] < 300;
  return ticks.map((n) => {
    const digit = Math.round(n / 10 ** Math.floor(Math.log10(n) + 1e-9));
    return digit === 1 || (short && (digit === 2 || digit === 5)) ? n : null;
  });
};

/** @param {Shown} shown @param {Line} line */
function seriesOf({ steps, stacked }, line) {
  const paint = () => colour(line.colour);
  return {
    label: line.label,
    stroke: paint,
    fill: stacked ? paint : undefined,
    width: stacked ? 0 : 2,
    dash: line.dash ? [7, 5] : [],
    points: { show: !stacked && steps.length < 60, size: 6, fill: paint },
  };
}

/** @param {HTMLElement} holder @param {number} height @param {Shown} shown @param {Asked} asked */
function create(holder, height, shown, asked) {
  const axis = axisStyle();
  // values that are not positive have no place on a logarithmic axis
  const values = shown.lines.map((line) =>
    shown.log ? line.values.map((n) => (n !== null && n > 0 ? n : null)) : line.values,
  );
  const plot = new uPlot(
    {
      width: holder.clientWidth,
      height,
      scales: {
        x: { time: false, range: (_, low, high) => [shown.low ?? low ?? 0, shown.high ?? high ?? 1] },
        y: { distr: shown.log ? 3 : 1, range: (_, low, top) => ends(shown, low, top) },
      },
      legend: { show: false },
      cursor: {
        y: false,
        points: { size: 9 },
        drag: { x: true, y: false, setScale: false },
        sync: { key: "steps", setSeries: false },
        bind: { dblclick: () => () => asked.zoom(null, null) },
      },
      axes: [
        { ...axis, size: 30, values: (_, steps) => steps.map((n) => (Number.isInteger(n) ? numberText(n) : "")) },
        {
          ...axis,
          size: 74,
          filter: shown.log ? (_, ticks) => marked(ticks) : undefined,
          values: (_, ticks) => ticks.map((n) => (n === null ? "" : shown.text(n))),
        },
      ],
      series: [{ label: "step" }, ...shown.lines.map((line) => seriesOf(shown, line))],
      hooks: {
        setCursor: [(u) => asked.tell(u.cursor.idx ?? null)],
        setSelect: [
          (u) => {
            const { left, width } = u.select;
            if (width < 4) return;
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            asked.zoom(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
          },
        ],
      },
    },
    [shown.steps, ...values],
    holder,
  );
  const stop = keepFitted(plot, holder);
  return {
    plot,
    destroy: () => {
      stop();
      plot.destroy();
    },
  };
}

/**
 * Returns what shows other lines in a holder, which gets the keys.
 * @param {HTMLElement} holder @param {number} height @param {Asked} asked
 * @returns {(shown: Shown) => void}
 */
export function stepChart(holder, height, asked) {
  /** @type {{ plot: uPlot, destroy: () => void } | null} */
  let chart = null;
  /** @type {number[]} */
  let steps = [];
  let from = 0;
  holder.addEventListener("pointerdown", (event) => {
    from = event.clientX;
  });
  holder.addEventListener("click", (event) => {
    const at = chart?.plot.cursor.idx;
    if (Math.abs(event.clientX - from) < 4 && at !== null && at !== undefined) asked.open(at);
  });
  holder.addEventListener("keydown", (event) => {
    if (!chart) return;
    const { plot } = chart;
    const [at, last] = [plot.cursor.idx ?? null, steps.length - 1];
    /** @type {Record<string, number>} */
    const places = {
      ArrowRight: Math.min(last, (at ?? -1) + 1),
      ArrowLeft: Math.max(0, (at ?? last + 1) - 1),
      Home: 0,
      End: last,
    };
    if (event.key === "Enter" && at !== null) asked.open(at);
    if (!(event.key in places)) return;
    event.preventDefault();
    plot.setCursor({ left: plot.valToPos(steps[places[event.key]], "x"), top: 20 });
  });
  return (shown) => {
    chart?.destroy();
    steps = shown.steps;
    chart = create(holder, height, shown, asked);
  };
}

/** Names the lines of a chart. @param {HTMLElement} list @param {{ label: string, colour: string }[]} lines */
export function nameLines(list, lines) {
  legend(
    list,
    lines.map((line) => ({
      text: line.label,
      draw: (/** @type {CanvasRenderingContext2D} */ g) => {
        g.fillStyle = colour(line.colour);
        g.fillRect(0, 3, 13, 7);
      },
    })),
  );
}
