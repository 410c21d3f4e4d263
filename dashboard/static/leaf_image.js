// @ts-check
/** A slice of an array as a picture: blue is below zero, orange above, and what is no number stands out. */
import { figure, find, numberText } from "./dom.js";
import { colour, follow, imageOf, legend, pixelOf, rgbOf, selectable } from "./canvas.js";

/** @typedef {{ rows: number, columns: number, limit: number, cells: string }} Picture */
/** @typedef {{ top: number, left: number, rows: number, columns: number, image: Picture | null }} Slice */

const BAD = -128;
const LARGEST = 26;
const HEIGHT = 420;
const readout = find("#peek-cell");

/** The colour of a cell, as bytes of a pixel. @param {number} cell @param {Record<string, number[]>} of */
function pixel(cell, of) {
  const share = Math.sqrt(Math.abs(cell) / 127); // small values are told apart
  const end = cell < 0 ? of.low : of.high;
  return pixelOf(cell === BAD ? of.bad : of.zero.map((n, i) => Math.round(n + (end[i] - n) * share)));
}

const colours = () => ({ low: rgbOf("--c0"), high: rgbOf("--c1"), zero: rgbOf("--soft"), bad: rgbOf("--bad") });

/** @type {{ slice: Slice, picture: Picture, cells: Int8Array } | null} */
let shown = null;
let chosen = -1;

/**
 * Where a cell begins and ends among all elements of a side.
 * @param {number} cell @param {number} cells @param {number} all
 */
const range = (cell, cells, all) => [Math.floor((cell * all) / cells), Math.floor(((cell + 1) * all) / cells)];

/** @param {number} cell */
function textOf(cell) {
  if (!shown || cell < 0) return "\u00a0";
  const { slice, picture, cells } = shown;
  const places = [
    range(Math.floor(cell / picture.columns), picture.rows, slice.rows).map((n) => n + slice.top),
    range(cell % picture.columns, picture.columns, slice.columns).map((n) => n + slice.left),
  ].map(([from, to]) => (to - from > 1 ? `${numberText(from)}:${numberText(to)}` : numberText(from)));
  const value = cells[cell] === BAD ? "NaN or Inf" : `about ${figure((cells[cell] / 127) * picture.limit)}`;
  const whose = slice.rows > picture.rows || slice.columns > picture.columns ? "largest value " : "";
  return `row ${places[0]}, column ${places[1]} · ${whose}${value}`;
}

const canvas = /** @type {HTMLCanvasElement} */ (find("#peek-image"));

/** @param {number} width */
function sizes(width) {
  const picture = shown?.picture ?? { rows: 1, columns: 1 };
  const side = Math.min(width / picture.columns, HEIGHT / picture.rows, LARGEST);
  return { w: side * picture.columns, h: Math.max(side * picture.rows, Math.min(16, LARGEST)) };
}

const redraw = follow(canvas, {
  height: (width) => sizes(width).h,
  draw(g, width, height) {
    if (!shown) return;
    const { picture, cells } = shown;
    const of = colours();
    const sheet = imageOf(Uint32Array.from(cells, (cell) => pixel(cell, of)), picture.columns);
    g.imageSmoothingEnabled = false;
    const { w } = sizes(width);
    g.clearRect(0, 0, width, height);
    g.drawImage(sheet, 0, 0, w, height);
    if (chosen < 0) return;
    const [cw, ch] = [w / picture.columns, height / picture.rows];
    g.strokeStyle = colour("--text");
    g.lineWidth = 1.5;
    const [x, y] = [(chosen % picture.columns) * cw, Math.floor(chosen / picture.columns) * ch];
    g.strokeRect(x, y, Math.max(cw, 2), Math.max(ch, 2));
  },
});

selectable(canvas, {
  count: () => shown?.cells.length ?? 0,
  at(x, y) {
    if (!shown) return -1;
    const { rows, columns } = shown.picture;
    const column = Math.floor((x / sizes(canvas.clientWidth).w) * columns);
    const row = Math.min(rows - 1, Math.floor((y / canvas.clientHeight) * rows));
    return column < columns ? row * columns + column : -1;
  },
  select(cell) {
    chosen = cell;
    readout.textContent = textOf(cell);
    redraw();
  },
});

/** Shows the picture of a slice, or none. @param {Slice} slice */
export function showPicture(slice) {
  const picture = slice.image;
  find("#peek-picture").hidden = !picture;
  if (!picture) return;
  const bytes = Uint8Array.from(atob(picture.cells), (c) => c.charCodeAt(0));
  shown = { slice, picture, cells: new Int8Array(bytes.buffer) };
  chosen = -1;
  readout.textContent = "\u00a0";
  /** @param {string} text @param {number} cell */
  const entry = (text, cell) => ({
    text,
    draw(/** @type {CanvasRenderingContext2D} */ g) {
      const p = pixel(cell, colours());
      g.fillStyle = `rgb(${p & 255}, ${(p >> 8) & 255}, ${(p >> 16) & 255})`;
      g.fillRect(0, 0, 13, 13);
    },
  });
  const entries = [entry(figure(-picture.limit), -127), entry("0", 0), entry(figure(picture.limit), 127)];
  if (shown.cells.includes(BAD)) entries.push(entry("NaN or Inf", BAD));
  legend(find("#peek-legend"), entries);
  redraw();
}
