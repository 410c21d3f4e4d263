// @ts-check
/** Colours of numbers: a ramp whose lightness keeps the order, and a matrix as an image of one pixel per number. */
import { colour } from "./canvas.js";

const STEPS = 256;

/** Red, green, blue of a colour of the sheet. @param {string} name @returns {number[]} */
function parts(name) {
  const text = colour(name);
  if (text.startsWith("#")) return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  return (text.match(/[\d.]+/g) ?? ["0", "0", "0"]).slice(0, 3).map(Number);
}

/** 256 colours from short to long, as the bytes of pixels; the last entry is for no value. @returns {Uint32Array} */
export function ramp() {
  const stops = ["--soft", "--c1", "--c5", "--gap"].map(parts);
  const at = [0, 0.45, 0.8, 1];
  const colours = new Uint32Array(STEPS + 1);
  for (let n = 0; n < STEPS; n += 1) {
    const x = n / (STEPS - 1);
    const k = Math.min(
      at.findIndex((stop, i) => i < at.length - 1 && x <= at[i + 1]),
      at.length - 2,
    );
    const f = (x - at[k]) / (at[k + 1] - at[k]);
    const [r, g, b] = stops[k].map((v, i) => Math.round(v + (stops[k + 1][i] - v) * f));
    colours[n] = ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  }
  return colours; // the last stays 0: transparent
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
 */
export function imageOf(columns, share) {
  const lines = columns[0].length;
  const width = columns.length;
  const image = new ImageData(width, lines);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = ramp();
  columns.forEach((numbers, column) => {
    for (let line = 0; line < lines; line += 1) {
      const part = share(numbers[line], column);
      pixels[line * width + column] = part < 0 ? 0 : colours[Math.min(STEPS - 1, Math.floor(part * STEPS))];
    }
  });
  const sheet = new OffscreenCanvas(width, lines);
  /** @type {OffscreenCanvasRenderingContext2D} */ (sheet.getContext("2d")).putImageData(image, 0, 0);
  return sheet;
}
