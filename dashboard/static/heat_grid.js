// @ts-check
/** A heat map of rows and columns, with the ramp of its colours: pointed at, and walked through with the arrow keys. */
import { colour, follow, imageOf, pixelOf, rgbOf } from "./canvas.js";
import { buttonGroup, find, recalled, remember, secondsText } from "./dom.js";

const STEPS = 256;

/** Colours of the sheet along a scale, and where they are on it. @typedef {[string, number][]} Stops */
/** Of time that is lost: a tenth of the scale is still pale. @type {Stops} */
const LOST = [["--soft", 0], ["--c1", 0.45], ["--c5", 0.8], ["--gap", 1]];
/** Of durations, of which none is good or bad. @type {Stops} */
const DURATION = [["--soft", 0], ["--c4", 0.5], ["--c0", 1]];

/** 256 colours from short to long, as the bytes of pixels. @param {Stops} scale @returns {Uint32Array} */
function ramp(scale) {
  const stops = scale.map(([name]) => rgbOf(name));
  const at = scale.map(([, place]) => place);
  const colours = new Uint32Array(STEPS);
  for (let n = 0; n < STEPS; n += 1) {
    const x = n / (STEPS - 1);
    const k = Math.min(
      at.findIndex((stop, i) => i < at.length - 1 && x <= at[i + 1]),
      at.length - 2,
    );
    const f = (x - at[k]) / (at[k + 1] - at[k]);
    colours[n] = pixelOf(stops[k].map((v, i) => Math.round(v + (stops[k + 1][i] - v) * f)));
  }
  return colours;
}

/**
 * Reduces rows to lines by their maximum, if there are more rows than lines: one slow rank of thousands stays visible.
 * @param {ArrayLike<number>[]} columns all of one length @param {number} lines
 * @returns {Float64Array[]}
 */
export function pooled(columns, lines) {
  return columns.map((numbers) => {
    const found = new Float64Array(lines);
    for (let line = 0; line < lines; line += 1) {
      const first = Math.floor((line * numbers.length) / lines);
      const last = Math.max(first + 1, Math.floor(((line + 1) * numbers.length) / lines));
      let most = numbers[first];
      for (let row = first + 1; row < last; row += 1) if (numbers[row] > most) most = numbers[row];
      found[line] = most;
    }
    return found;
  });
}

/**
 * Paints a matrix as an image with one pixel for each number.
 * @param {ArrayLike<number>[]} columns
 * @param {(number: number, column: number) => number} share from 0 to 1, below 0 for none
 * @param {Stops} [scale]
 */
export function matrixImage(columns, share, scale = LOST) {
  const width = columns.length;
  const pixels = new Uint32Array(width * columns[0].length);
  const colours = ramp(scale);
  columns.forEach((numbers, column) => {
    for (let line = 0; line < numbers.length; line += 1) {
      const part = share(numbers[line], column);
      pixels[line * width + column] = part < 0 ? 0 : colours[Math.min(STEPS - 1, Math.floor(part * STEPS))];
    }
  });
  return imageOf(pixels, width);
}

/** Room for the names of rows, and at the right. */
export const LEFT = 78;
const RIGHT = 8;

/**
 * What is drawn. `values` has an array of numbers for each column; `state` is another text whenever `values` or `share`
 * would give other results; `head` and `foot` are the pixels above and below the cells.
 * @typedef {{
 *   values: () => ArrayLike<number>[],
 *   stops: () => Stops,
 *   share: (number: number, column: number) => number,
 *   state: () => string,
 *   body: () => number,
 *   head: (width: number) => number,
 *   foot: number,
 *   rowLabel: (row: number) => string,
 *   drawColumns: (g: CanvasRenderingContext2D, column: number, top: number, bottom: number) => void,
 *   textOf: (row: number, column: number) => string,
 *   open?: (row: number, column: number) => void,
 * }} Grid
 */

/** Text cut to a width. @param {CanvasRenderingContext2D} g @param {string} text @param {number} room */
export function short(g, text, room) {
  if (g.measureText(text).width <= room) return text;
  let end = text.length;
  while (end > 1 && g.measureText(`${text.slice(0, end)}…`).width > room) end -= 1;
  return `${text.slice(0, end)}…`;
}

/**
 * Draws lines between cells that are wide or high enough.
 * @param {CanvasRenderingContext2D} g @param {number} up @param {number} w @param {number} h
 * @param {number} columns @param {number} rows
 */
function drawGaps(g, up, w, h, columns, rows) {
  g.fillStyle = colour("--card");
  for (let c = 1; c < columns && w / columns > 6; c += 1) g.fillRect(LEFT + (c * w) / columns - 0.5, up, 1, h);
  for (let r = 1; r < rows && h / rows > 6; r += 1) g.fillRect(LEFT, up + (r * h) / rows - 0.5, w, 1);
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {(text: string, at?: { x: number, y: number } | null) => void} note shows what is chosen
 * @param {Grid} grid
 * @returns {() => void} draws it again
 */
export function heatGrid(canvas, note, grid) {
  let [row, column] = [-1, -1];
  /** Of each column, as many numbers as there are lines. @type {Float64Array[]} */
  let few = [];
  /** @type {OffscreenCanvas | null} */
  let image = null;
  let painted = "";
  const size = () => ({ columns: grid.values().length, rows: grid.values()[0]?.length ?? 0 });

  /** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height */
  function draw(g, width, height) {
    const { columns, rows } = size();
    g.clearRect(0, 0, width, height);
    if (!columns || !rows) return;
    const [up, w, body] = [grid.head(width), width - LEFT - RIGHT, grid.body()];
    const [cw, ch] = [w / columns, body / rows];
    const lines = Math.max(1, Math.min(rows, Math.round(body * Math.min(window.devicePixelRatio || 1, 2))));
    const state = `${lines} ${grid.state()} ${colour("--card")} ${colour("--c1")}`;
    if (!image || state !== painted) {
      few = pooled(grid.values(), lines);
      image = matrixImage(few, (n, c) => (n < 0 ? -1 : Math.min(1, grid.share(n, c))), grid.stops());
      painted = state;
    }
    g.imageSmoothingEnabled = false;
    g.drawImage(image, LEFT, up, w, body);
    drawGaps(g, up, w, body, columns, rows);
    g.fillStyle = colour("--dim");
    grid.drawColumns(g, cw, up, up + body);
    g.textAlign = "left";
    for (let r = 0, free = -99; r < rows; r += 1) {
      const y = up + (r + 0.5) * ch;
      if (y < free) continue;
      g.fillText(short(g, grid.rowLabel(r), LEFT - 12), 6, y);
      free = y + Math.max(16, rows > 40 ? 40 : 0);
    }
    if (row >= 0 && column >= 0 && row < rows && column < columns) {
      g.strokeStyle = colour("--text");
      g.lineWidth = 2;
      g.strokeRect(LEFT + column * cw, up + row * ch - (ch < 3 ? 1 : 0), Math.max(cw, 2), Math.max(ch, 3));
    }
  }
  const redraw = follow(canvas, { height: (width) => grid.head(width) + grid.body() + grid.foot, draw });

  /** @param {number} r @param {number} c @param {{ x: number, y: number } | null} [point] */
  function choose(r, c, point = null) {
    const changed = r !== row || c !== column;
    [row, column] = [r, c];
    note(r < 0 || c < 0 ? "" : grid.textOf(r, c), point);
    if (changed) redraw();
  }
  canvas.addEventListener("pointermove", (event) => {
    const { columns, rows } = size();
    const width = canvas.clientWidth;
    const c = Math.floor(((event.offsetX - LEFT) / (width - LEFT - RIGHT)) * columns);
    const r = Math.floor(((event.offsetY - grid.head(width)) / grid.body()) * rows);
    const inside = c >= 0 && c < columns && r >= 0 && r < rows;
    choose(inside ? r : -1, inside ? c : -1, { x: event.offsetX, y: event.offsetY });
  });
  canvas.addEventListener("pointerleave", () => choose(-1, -1));
  canvas.addEventListener("click", () => row >= 0 && column >= 0 && grid.open?.(row, column));
  canvas.addEventListener("keydown", (event) => {
    const { columns, rows } = size();
    /** @type {Record<string, [number, number]>} */
    const steps = {
      ArrowRight: [0, 1],
      ArrowLeft: [0, -1],
      ArrowDown: [1, 0],
      ArrowUp: [-1, 0],
      PageDown: [20, 0],
      PageUp: [-20, 0],
      Home: [-rows, 0],
      End: [rows, 0],
    };
    if (event.key === "Escape") choose(-1, -1);
    if (event.key === "Enter" && row >= 0 && column >= 0) grid.open?.(row, column);
    const step = steps[event.key];
    if (!step || !columns || !rows || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const within = (/** @type {number} */ n, /** @type {number} */ count) => Math.max(0, Math.min(count - 1, n));
    choose(row < 0 ? 0 : within(row + step[0], rows), column < 0 ? 0 : within(column + step[1], columns));
  });
  return redraw;
}

/**
 * The choice of what colours stand for, with the scale of its ends: the time lost to the median rank, or all of it.
 * @param {string} name of the choice, in the address and in the attributes of its buttons
 * @param {{ lost: () => number, longest: () => number }} ends of the scale in seconds @param {() => void} redraw
 */
export function colourScale(name, { lost, longest }, redraw) {
  let all = recalled(name) === "duration";
  const stops = () => (all ? DURATION : LOST);
  const redrawRamp = follow(/** @type {HTMLCanvasElement} */ (find("#heat-scale")), {
    height: () => 10,
    draw: (g, width) => {
      const colours = ramp(stops());
      for (let x = 0; x < width; x += 1) {
        const n = colours[Math.floor((x / width) * STEPS)];
        g.fillStyle = `rgb(${n & 255} ${(n >> 8) & 255} ${(n >> 16) & 255})`;
        g.fillRect(x, 0, 1.5, 10);
      }
    },
  });
  const showEnds = () => {
    find("#heat-low").textContent = all ? "duration: 0" : "lost to the median rank: 0";
    find("#heat-high").textContent = secondsText(all ? longest() : lost());
    redrawRamp();
  };
  buttonGroup(`data-${name}`, (value) => {
    all = value === "duration";
    remember({ [name]: all ? value : null });
    showEnds();
    redraw();
  })(all ? "duration" : "lost");
  return { all: () => all, stops, showEnds };
}

/** How much longer than the median rank's a time is, as a text that follows it. @param {number} seconds */
export const lostText = (seconds) => (seconds > 0 ? `, ${secondsText(seconds)} lost to the median rank` : "");
