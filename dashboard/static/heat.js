// @ts-check
/** Colour for numbers: a ramp that keeps its order without hue, and a matrix painted cell by cell as an image. */
import { colour } from "./canvas.js";

const STEPS = 256;

/** Red, green, blue of a colour of the sheet. @param {string} name @returns {number[]} */
function parts(name) {
  const text = colour(name);
  if (text.startsWith("#")) return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  return (text.match(/[\d.]+/g) ?? ["0", "0", "0"]).slice(0, 3).map(Number);
}

/** 256 colours from quiet to loud, as the bytes of pixels; the last entry is for no value. @returns {Uint32Array} */
export function ramp() {
  const stops = ["--soft", "--c1", "--c5", "--gap"].map(parts);
  const at = [0, 0.45, 0.8, 1];
  const colours = new Uint32Array(STEPS + 1);
  for (let n = 0; n < STEPS; n += 1) {
    const x = n / (STEPS - 1);
    const k = Math.min(at.findIndex((stop, i) => i < at.length - 1 && x <= at[i + 1]), at.length - 2);
    const f = (x - at[k]) / (at[k + 1] - at[k]);
    const [r, g, b] = stops[k].map((v, i) => Math.round(v + (stops[k + 1][i] - v) * f));
    colours[n] = ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  }
  return colours; // the last stays 0: transparent
}

/**
 * Paints a matrix into a box. Where there are more rows than pixels, each pixel shows the largest of its rows: one slow rank of thousands stays visible.
 * @param {CanvasRenderingContext2D} g
 * @param {{ rows: number, columns: number, value: (row: number, column: number) => number }} matrix values from 0 to 1, below 0 for none
 * @param {number} x @param {number} y @param {number} w @param {number} h
 */
export function paint(g, matrix, x, y, w, h) {
  const { rows, columns, value } = matrix;
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const lines = Math.max(1, Math.min(rows, Math.round(h * ratio)));
  const image = new ImageData(Math.max(1, columns), lines);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = ramp();
  for (let line = 0; line < lines; line += 1) {
    const first = Math.floor((line * rows) / lines), last = Math.max(first + 1, Math.floor(((line + 1) * rows) / lines));
    for (let column = 0; column < columns; column += 1) {
      let most = -1;
      for (let row = first; row < last; row += 1) { const v = value(row, column); if (v > most) most = v; }
      pixels[line * columns + column] = most < 0 ? 0 : colours[Math.min(STEPS - 1, Math.floor(most * STEPS))];
    }
  }
  const sheet = new OffscreenCanvas(image.width, image.height);
  /** @type {OffscreenCanvasRenderingContext2D} */ (sheet.getContext("2d")).putImageData(image, 0, 0);
  g.imageSmoothingEnabled = false;
  g.drawImage(sheet, x, y, w, h);
}
