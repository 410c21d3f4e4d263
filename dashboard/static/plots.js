// @ts-check
/** Charts of uPlot in the colours of the page, as wide as their holder: bars, and lines or stacked areas over steps. */
import { colour, legend, selectable } from "./canvas.js";
import { phaseFill } from "./phases.js";
import { buttonGroup, numberText, recalled, remember } from "./dom.js";

/** Steps between the marks of an axis of whole numbers. */
const WHOLE = Array.from({ length: 16 }, (_, n) => [1, 2, 5].map((digit) => digit * 10 ** n)).flat();

/**
 * The texts of the marks of an axis, with as many digits as tell them apart.
 * @param {(n: number, digits?: number) => string} text @param {(number | null)[]} marks null has no text
 * @param {number} step between them
 */
function markTexts(text, marks, step) {
  const most = marks.reduce((/** @type {number} */ top, n) => Math.max(top, Math.abs(n ?? 0)), 0);
  const digits = Math.max(3, Math.ceil(Math.log10(most / step || 1)) + 2);
  return marks.map((n) => (n === null ? "" : text(n, Math.min(digits, 15))));
}

/** The style of an axis. */
const axisStyle = () => ({
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
function keepFitted(plot, holder) {
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
 *   values: number[], fillOf: (bar: number) => string, text: (value: number, digits?: number) => string,
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
        {
          ...axisStyle(),
          size: 74,
          space: 32,
          incrs: WHOLE,
          values: (_, ticks, __, ___, step) => markTexts(bars.text, ticks, step),
        },
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

/**
 * What a chart shows. `stacked` lines are sums, the largest first, filled down to zero; `max` is the end of the axis,
 * which begins at zero unless `free` or `log`. With `time` the steps are Unix times in seconds. A `faint` line stands
 * behind the others, a `wide` one is seen beside one that lies on it; of several lines that lie on each other, `turn`
 * [n, of] is drawn in every n-th of so many dashes. The colour of a phase is its `paint`. `marks` are the values that
 * are no finite numbers, by save; `whole` is an axis of whole numbers. A save has one name of `ids` on every axis.
 * @typedef {{
 *   label: string, colour: string, values: (number | null | undefined)[], dash?: boolean, faint?: boolean,
 *   wide?: boolean, paint?: number, turn?: [number, number] | null,
 * }} Line
 * @typedef {{
 *   steps: number[], ids: string[], lines: Line[], text: (n: number, digits?: number) => string, stacked?: boolean,
 *   max?: number, free?: boolean, log?: boolean, time?: boolean, whole?: boolean, marks?: (string | null)[],
 *   low: number | null, high: number | null,
 * }} Shown
 * @typedef {Pick<Line, "label" | "colour" | "wide" | "dash" | "faint" | "turn">} Sign
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

/**
 * The texts of an axis of time: the clock, and the date where it changes or where a day is the smallest step.
 * @param {uPlot} _ @param {number[]} places @param {number} __ @param {number} ___ @param {number} step in seconds
 */
function timeTexts(_, places, __, ___, step) {
  return places.map((place, n) => {
    const [date, clock] = new Date(place * 1000).toISOString().slice(0, 19).split("T");
    const before = n ? new Date(places[n - 1] * 1000).toISOString().slice(0, 10) : "";
    if (step >= 86_400) return date;
    const text = step >= 60 ? clock.slice(0, 5) : clock;
    return date === before ? text : `${text}\n${date}`;
  });
}

/** Marks the saves whose value is no finite number at the bottom of a chart. @param {uPlot} u @param {Shown} shown */
function drawMarks(u, { steps, marks }) {
  u.ctx.save();
  u.ctx.fillStyle = u.ctx.strokeStyle = colour("--gap");
  u.ctx.textAlign = "center";
  const [bottom, size] = [u.bbox.top + u.bbox.height, 4 * devicePixelRatio];
  let free = -Infinity;
  marks?.forEach((mark, n) => {
    const x = u.valToPos(steps[n], "x", true);
    if (!mark || x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
    u.ctx.beginPath();
    for (const side of [-1, 1]) {
      u.ctx.moveTo(x - size, bottom - side * size - size);
      u.ctx.lineTo(x + size, bottom + side * size - size);
    }
    u.ctx.stroke();
    if (x < free) return;
    u.ctx.fillText(mark, x, bottom - 4 * size);
    free = x + u.ctx.measureText(mark).width + 4 * size;
  });
  u.ctx.restore();
}

/** What an area, or the line of a legend, is filled with. @param {CanvasRenderingContext2D} g @param {Line} line */
const fillOf = (g, line) => (line.paint === undefined ? colour(line.colour) : phaseFill(g, line.paint));

/**
 * The dashes of a line: of those in turns, each begins where the one before it ends.
 * @param {Sign} line @param {number} long of a dash in turns @param {number[]} dash of a dashed line
 */
function dashesOf({ turn, dash: dashed }, long, dash) {
  if (!turn) return dashed ? dash : [];
  const [n, of] = turn;
  return [0, n * long, long, (of - 1 - n) * long];
}

/** @param {Shown} shown @param {Line} line */
function seriesOf({ steps, stacked }, line) {
  const paint = () => colour(line.colour);
  // points that lie on each other are rings around the last one
  const behind = line.turn ? line.turn[1] - 1 - line.turn[0] : 0;
  return {
    label: line.label,
    stroke: paint,
    fill: stacked ? (/** @type {uPlot} */ u) => fillOf(u.ctx, line) : undefined,
    // an area of a single save would have no width
    paths: stacked && steps.length === 1 ? uPlot.paths.bars({ size: [0.2, 80] }) : undefined,
    width: stacked ? 0 : line.faint ? 1 : line.wide ? 4 : 2,
    alpha: line.faint ? 0.6 : 1,
    dash: dashesOf(line, 14, [7, 5]),
    points: { show: !stacked && steps.length < 60, size: line.wide ? 9 : 5 + 3 * behind, fill: paint },
  };
}

/**
 * @param {HTMLElement} holder @param {number} height @param {Shown} shown @param {Asked} asked
 * @param {number} at the save under the cursor, -1 for none
 */
function createLines(holder, height, shown, asked, at) {
  const axis = axisStyle();
  // values that are not positive have no place on a logarithmic axis
  const values = shown.lines.map((line) =>
    shown.log ? line.values.map((n) => (typeof n === "number" && n <= 0 ? null : n)) : line.values,
  );
  const plot = new uPlot(
    {
      width: holder.clientWidth,
      height,
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      scales: {
        x: { time: shown.time ?? false, range: (_, low, high) => [shown.low ?? low ?? 0, shown.high ?? high ?? 1] },
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
        shown.time
          ? { ...axis, size: 46, label: "UTC", labelSize: 14, space: 90, values: timeTexts }
          : { ...axis, size: 30, values: (_, steps) => steps.map((n) => (Number.isInteger(n) ? numberText(n) : "")) },
        {
          ...axis,
          size: 74,
          filter: shown.log ? (_, ticks) => marked(ticks) : undefined,
          incrs: shown.whole && !shown.log ? WHOLE : undefined,
          values: (_, ticks, __, ___, step) => markTexts(shown.text, ticks, step),
        },
      ],
      series: [{ label: "step" }, ...shown.lines.map((line) => seriesOf(shown, line))],
      hooks: {
        draw: [(u) => drawMarks(u, shown)],
        ready: [(u) => at >= 0 && pointAt(u, shown.steps[at])],
        setCursor: [(u) => asked.tell(u.cursor.idx ?? null)],
        setSelect: [
          (u) => {
            const { left, width } = u.select;
            if (width < 4) return;
            // Without a call of this hook.
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
 * Puts the cursor on a place of the horizontal axis.
 * @param {uPlot} u @param {number} place @param {boolean} [everywhere] whether the other charts follow
 */
const pointAt = (u, place, everywhere) => u.setCursor({ left: u.valToPos(place, "x"), top: 20 }, true, everywhere);

/**
 * Returns what shows other lines in a holder, which gets the keys. The cursor stays on its save.
 * @param {HTMLElement} holder @param {number} height @param {Asked} asked
 * @returns {(shown: Shown) => void}
 */
export function stepChart(holder, height, asked) {
  /** @type {{ plot: uPlot, destroy: () => void } | null} */
  let chart = null;
  /** @type {Pick<Shown, "steps" | "ids">} */
  let { steps, ids } = { steps: [], ids: [] };
  let from = 0;
  holder.addEventListener("pointerdown", (event) => {
    from = event.clientX;
  });
  holder.addEventListener("click", (event) => {
    const at = chart?.plot.cursor.idx;
    // The end of a drag over a range is a click too.
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
    pointAt(plot, steps[places[event.key]], true);
  });
  return (shown) => {
    const at = shown.ids.indexOf(ids[chart?.plot.cursor.idx ?? -1]);
    chart?.destroy();
    ({ steps, ids } = shown);
    chart = createLines(holder, height, shown, asked, at);
  };
}

/** The sign of a line, as it is drawn. @param {CanvasRenderingContext2D} g @param {Sign} line */
function drawSign(g, line) {
  g.strokeStyle = colour(line.faint ? "--dim" : line.colour);
  g.lineWidth = line.faint ? 1 : line.wide ? 5 : 3;
  g.setLineDash(dashesOf(line, 13 / (line.turn?.[1] ?? 1), [5, 3]));
  g.beginPath();
  g.moveTo(0, 6.5);
  g.lineTo(13, 6.5);
  g.stroke();
}

/**
 * Names the lines of a chart, and what is marked with a cross.
 * @param {HTMLElement} list @param {Sign[]} lines @param {boolean} [marked] whether values are no finite numbers
 */
export function nameLines(list, lines, marked = false) {
  const cross = {
    text: "no finite number",
    draw: (/** @type {CanvasRenderingContext2D} */ g) => {
      g.strokeStyle = colour("--gap");
      g.beginPath();
      for (const [from, to] of [[2, 11], [11, 2]]) {
        g.moveTo(2, from);
        g.lineTo(11, to);
      }
      g.stroke();
    },
  };
  const signs = lines.map((line) => ({
    text: line.label,
    draw: (/** @type {CanvasRenderingContext2D} */ g) => drawSign(g, line),
  }));
  legend(list, marked ? [...signs, cross] : signs);
}

/** The choice of the axis of saves: by step or by time. Returns whether it is time. @param {() => void} redraw */
export function axisChoice(redraw) {
  let time = recalled("along") === "time";
  buttonGroup("data-along", (value) => {
    time = value === "time";
    remember({ along: time ? value : null });
    redraw();
  })(time ? "time" : "step");
  return () => time;
}

/** The choice of the axis of values. Returns whether it is logarithmic, not linear. @param {() => void} redraw */
export function scaleChoice(redraw) {
  let log = recalled("axis") === "log";
  buttonGroup("data-axis", (value) => {
    log = value === "log";
    remember({ axis: log ? value : null });
    redraw();
  })(log ? "log" : "linear");
  return () => log;
}
