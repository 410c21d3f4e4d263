// @ts-check
/**
 * Formats the numbers of one column alike, in one unit and with as many digits after the point in every row, by the
 * rules of treeckpt/_core/columns.py.
 */
import { BYTE_UNITS, bytesText, secondsText } from "./dom.js";

/** @typedef {number | string | null | undefined} Value a text is no number (`NaN`), and stays as it is */
/** @typedef {[size: number, name: string, most: number]} Unit `most`: digits after the point at most */

/** @type {Unit[]} */
const BYTES = BYTE_UNITS.map((name, n) => [1000 ** n, name, n ? 2 : 0]);
/** @type {Unit[]} */
const SECONDS = [
  [1e-6, "µs", 3],
  [1e-3, "ms", 2],
  [1, "s", 2],
];
/** How many times the smallest value the largest is, at most, where both are in one unit. */
const SPREAD = 1e4;
/** Whole numbers up to it are written out with separators; JSON has larger ones as texts. */
const WHOLE = 2 ** 53;

/** @param {Value[]} values */
const finite = (values) => /** @type {number[]} */ (values.filter(Number.isFinite));

/** The smallest magnitude that is not zero, and the largest; zeros where there is none. @param {Value[]} values */
function extent(values) {
  let [low, high] = [Infinity, 0];
  for (const value of finite(values)) {
    if (value) low = Math.min(low, Math.abs(value));
    high = Math.max(high, Math.abs(value));
  }
  return high ? [low, high] : [0, 0];
}

/** The power of ten of a value that is rounded to three digits. @param {number} value */
const exponent = (value) => Number(value.toExponential(2).split("e")[1]);

/**
 * How many digits after the point a value has that is rounded to so many digits.
 * @param {number} value @param {number} digits
 */
function decimalsOf(value, digits) {
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  return Math.max((mantissa.split(".")[1] ?? "").replace(/0+$/, "").length - Number(power), 0);
}

/** The unit of a column. @param {Unit[]} units @param {number} low @param {number} high @returns {Unit} */
function scaleOf(units, low, high) {
  for (let at = units.length - 1; ; at -= 1) {
    const [size, name, most] = units[at];
    const decimals = Math.max(2 - exponent(high / size), 1 - exponent(low / size), 0);
    if (at === 0 || (high >= 0.9995 * size && decimals <= 2)) return [size, name, Math.min(decimals, most)];
  }
}

/** With separators of thousands, and so many digits after the point. @param {number} value @param {number} decimals */
function fixed(value, decimals) {
  const options = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return Number(value.toFixed(decimals)).toLocaleString("en", options);
}

/** @param {number} seconds @param {number} size @param {string} large @param {string} small */
function inSixties(seconds, size, large, small) {
  const count = Math.round(Math.abs(seconds) / size);
  const rest = String(count % 60).padStart(2, "0");
  return `${seconds < 0 ? "-" : ""}${fixed(Math.floor(count / 60), 0)} ${large} ${rest} ${small}`;
}

/** @param {Unit[]} units @param {number} low @param {number} high @param {string} [per] */
function inUnit(units, low, high, per = "") {
  const [size, name, decimals] = scaleOf(units, low, high);
  return (/** @type {number} */ value) => `${fixed(value / size, decimals)} ${name}${per}`;
}

/**
 * Returns what formats the bytes of a column, or with `per` its rates.
 * @param {Value[]} values @param {string} [per] @returns {(nbytes: number) => string}
 */
export function bytesColumn(values, per = "") {
  const [low, high] = extent(values);
  if (high > low * SPREAD) return (nbytes) => bytesColumn([nbytes], per)(nbytes);
  if (!high) return (nbytes) => bytesText(nbytes) + per;
  return inUnit(BYTES, low, high, per);
}

/** Returns what formats the durations of a column. @param {Value[]} values @returns {(seconds: number) => string} */
export function secondsColumn(values) {
  const [low, high] = extent(values);
  if (high > low * SPREAD) return (seconds) => secondsColumn([seconds])(seconds);
  if (!high) return secondsText;
  if (high >= 3599.5 && low >= 600) return (seconds) => inSixties(seconds, 60, "h", "min");
  if (high >= 99.95 && low >= 10) return (seconds) => inSixties(seconds, 1, "min", "s");
  return inUnit(SECONDS, low, high);
}

/**
 * Returns what formats numbers without a unit, the largest with so many digits.
 * @param {Value[]} values @param {number} [digits] @returns {(value: number | string) => string}
 */
export function numbersColumn(values, digits = 5) {
  const [low, high] = extent(values);
  const needed = finite(values).reduce((most, value) => Math.max(most, decimalsOf(value, digits)), 0);
  const decimals = Math.min(needed, Math.max(digits - 1 - exponent(high), 1 - exponent(low), 0));
  const alike = high <= low * SPREAD && decimals <= 8 && high <= WHOLE;
  return (value) => (typeof value === "string" ? value : alike ? fixed(value, decimals) : alone(value, digits));
}

/** A number of a column whose numbers have nothing in common. @param {number} value @param {number} digits */
function alone(value, digits) {
  if (Number.isInteger(value) && Math.abs(value) <= WHOLE) return fixed(value, 0);
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  if (Number(power) >= -4 && Number(power) < digits) return String(Number(value.toPrecision(digits)));
  return `${Number(mantissa)}e${power[0]}${power.slice(1).padStart(2, "0")}`;
}
