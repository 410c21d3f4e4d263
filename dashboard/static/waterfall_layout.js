// @ts-check
/**
 * The columns of a save's spans, and their layout: few ranks with all lanes, or many ranks with one line each.
 */

/**
 * @typedef {{
 *   unit: number, total: number, phases: string[], waiting: boolean[], ranks: number[], counts: number[],
 *   busy: number[], blocked: (number | null)[], phase: number[], start: number[], length: number[],
 *   lane: number[], nbytes: number[], critical: number[][], stragglers: number[],
 * }} Columns
 */
/** @typedef {{ t0: number, t1: number, r0: number, r1: number }} View in units of time and positions of rows */
/**
 * @typedef {{ row: number, rank: number, from: number, to: number, top: number, height: number }} Band `row` is a
 *   rank's position in the columns; the band stands for the rows `from` to `to`
 */

export const LANE = 17;
export const GAP = 9;
export const TOP = 26;
/** Ranks that are drawn with all lanes; of more ranks each gets one line. */
export const DETAIL = 40;
const OVERVIEW = 460;

/** The position of the first span of each rank, and at last the number of spans. @param {Columns} data */
export function edgesOf(data) {
  const edges = new Int32Array(data.counts.length + 1);
  data.counts.forEach((count, at) => {
    edges[at + 1] = edges[at] + count;
  });
  return edges;
}

/** The positions of ranks in drawing order. @param {Columns} data @param {string} order */
export function orderOf(data, order) {
  const rows = Int32Array.from(data.ranks, (_, at) => at);
  return order === "slow" ? rows.sort((a, b) => data.busy[b] - data.busy[a] || a - b) : rows;
}

/**
 * Computes the bands of a view, from top to bottom. With more rows than lines, a line shows the slowest of its ranks.
 * @param {Columns} data @param {Int32Array} edges @param {Int32Array} rows @param {View} view
 * @returns {{ bands: Band[], height: number, detail: boolean }}
 */
export function bandsOf(data, edges, rows, view) {
  const count = view.r1 - view.r0;
  /** @type {Band[]} */
  const bands = [];
  if (count <= DETAIL) {
    let top = TOP;
    for (let at = view.r0; at < view.r1; at += 1) {
      const row = rows[at];
      let lanes = 1;
      for (let s = edges[row]; s < edges[row + 1]; s += 1) lanes = Math.max(lanes, data.lane[s] + 1);
      bands.push({ row, rank: data.ranks[row], from: at, to: at + 1, top, height: lanes * LANE });
      top += lanes * LANE + GAP;
    }
    return { bands, height: top, detail: true };
  }
  const lines = Math.min(count, OVERVIEW);
  for (let line = 0; line < lines; line += 1) {
    const from = view.r0 + Math.floor((line * count) / lines);
    const to = view.r0 + Math.floor(((line + 1) * count) / lines);
    let row = rows[from];
    for (let at = from + 1; at < to; at += 1) if (data.busy[rows[at]] > data.busy[row]) row = rows[at];
    bands.push({
      row,
      rank: data.ranks[row],
      from,
      to,
      top: TOP + (line * OVERVIEW) / lines,
      height: OVERVIEW / lines,
    });
  }
  return { bands, height: TOP + OVERVIEW + 4, detail: false };
}

/**
 * The innermost span of a band at a time, or -1.
 * @param {Columns} data @param {Int32Array} edges @param {Band} band @param {number} time
 * @param {number} lane -1 for any
 * @param {number} near
 */
export function spanAt(data, edges, band, time, lane, near) {
  let found = -1;
  for (let s = edges[band.row]; s < edges[band.row + 1]; s += 1) {
    const inside = time >= data.start[s] - near && time <= data.start[s] + data.length[s] + near;
    if (inside && (lane < 0 || data.lane[s] === lane)) found = s;
  }
  return found;
}
