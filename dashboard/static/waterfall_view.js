// @ts-check
/** The view of the waterfall in the page's address, and what is chosen as text. */
import { bytesText, recalled, remember, secondsText } from "./dom.js";

/** @typedef {import("./waterfall_draw.js").Scene} Scene */

/**
 * Two bounds within 0 and `size`; all of it if they are not valid.
 * @param {number[]} bounds @param {number} size
 * @returns {[number, number]}
 */
export const fit = ([low, high], size) =>
  low < high && low < size && high > 0 ? [Math.max(0, low), Math.min(size, high)] : [0, size];

/** Writes the view into the address. @param {Scene} scene */
export function rememberView({ data, order, rows, view }) {
  const seconds = (/** @type {number} */ t) => Number((t * data.unit).toPrecision(6));
  remember({
    t: view.t0 === 0 && view.t1 === data.total ? null : `${seconds(view.t0)}-${seconds(view.t1)}`,
    r: view.r0 === 0 && view.r1 === rows.length ? null : `${view.r0}-${view.r1}`,
    order: order === "rank" ? null : order,
  });
}

/** Reads the view from the address. @param {Scene} scene @returns {import("./waterfall_layout.js").View} */
export function recallView({ data, rows }) {
  const pair = (/** @type {string} */ name) => {
    const found = (recalled(name) ?? "").match(/^([\d.e-]+?)-([\d.e-]+)$/);
    return found ? [Number(found[1]), Number(found[2])] : [];
  };
  const times = pair("t").map((seconds) => seconds / data.unit);
  const [t0, t1] = fit(times, data.total);
  const [r0, r1] = fit(pair("r").map(Math.round), rows.length);
  return { t0, t1, r0, r1 };
}

/** A span or a band as text. @param {Scene} scene @param {number} item */
export function textOf({ data, edges, layout, stragglers }, item) {
  if (item < 0) return "";
  if (!layout.detail) {
    const { from, to, rank, row } = layout.bands[item];
    const more = to - from > 1 ? `, the slowest of ${to - from}` : "";
    const straggler = stragglers.has(rank) ? " · straggler" : "";
    return `rank ${rank}${more} · active time ${secondsText(data.busy[row] * data.unit)}${straggler}`;
  }
  const band = layout.bands.find(({ row }) => item >= edges[row] && item < edges[row + 1]);
  const took = data.length[item] * data.unit;
  const nbytes = data.nbytes[item];
  const rate = nbytes && took ? ` · ${bytesText(nbytes)} at ${bytesText(nbytes / took)}/s` : "";
  const when = `${secondsText(took)}, from ${secondsText(data.start[item] * data.unit)} on`;
  return `rank ${data.ranks[band?.row ?? 0]} · ${data.phases[data.phase[item]]} · ${when}${rate}`;
}
