// @ts-check
/** The waterfall of a save with its legend: zoomed by dragging and by keys, and walked through with the arrow keys. */
import { api, buttonGroup, bytesText, countText, figure, find } from "./dom.js";
import { drawn, recalled, remember, secondsText } from "./dom.js";
import { follow, noter } from "./canvas.js";
import { namePhases, paintOf } from "./phases.js";
import { LEFT, drawWaterfall, pixelsPerUnit } from "./waterfall_draw.js";
import { LANE, bandsOf, edgesOf, orderOf, spanAt } from "./waterfall_layout.js";

/** @typedef {import("./waterfall_draw.js").Scene} Scene */
/** @typedef {import("./waterfall_layout.js").Columns} Columns */

const CLICK = 6; // pixels that the pointer may move in a click
const AROUND = 24; // ranks that Enter on a line of the overview shows

/**
 * Two bounds within 0 and `size`; all of it if they are not valid.
 * @param {number[]} bounds @param {number} size
 * @returns {[number, number]}
 */
const fit = ([low, high], size) =>
  low < high && low < size && high > 0 ? [Math.max(0, low), Math.min(size, high)] : [0, size];

/** Writes the view into the address. @param {Scene} scene */
function rememberView({ data, order, rows, view }) {
  const seconds = (/** @type {number} */ t) => figure(t * data.unit, 6);
  remember({
    t: view.t0 === 0 && view.t1 === data.total ? null : `${seconds(view.t0)}-${seconds(view.t1)}`,
    r: view.r0 === 0 && view.r1 === rows.length ? null : `${view.r0}-${view.r1}`,
    order: order === "rank" ? null : order,
  });
}

/** Reads the view from the address. @param {Scene} scene @returns {import("./waterfall_layout.js").View} */
function recallView({ data, rows }) {
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
function textOf({ data, edges, layout, stragglers }, item) {
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

/**
 * The scene of a save with all of it in view.
 * @param {Columns} data @param {number | null} slowest @param {string} order
 * @returns {Scene}
 */
function sceneOf(data, slowest, order) {
  const paints = data.phases.map((name, n) => paintOf(name, data.waiting[n]));
  const edges = edgesOf(data);
  const rows = orderOf(data, order);
  const view = { t0: 0, t1: data.total, r0: 0, r1: rows.length };
  const layout = bandsOf(data, edges, rows, view);
  const stragglers = new Set(data.stragglers);
  return { data, edges, rows, paints, stragglers, slowest, order, view, chosen: -1, layout, drag: null };
}

/**
 * Shows a save on the canvas.
 * @param {HTMLCanvasElement} canvas @param {Columns} data
 * @param {number | null} slowest the rank to mark
 * @param {(text: string, at?: { x: number, y: number } | null) => void} note shows what is chosen
 * @returns {number[]} the colour number of each phase
 */
function showWaterfall(canvas, data, slowest, note) {
  const order = recalled("order") === "slow" ? "slow" : "rank";
  const scene = sceneOf(data, slowest, order);
  const redraw = follow(canvas, {
    height: () => scene.layout.height,
    draw: (g, width, height) => drawWaterfall(g, width, height, scene),
  });

  /** @param {Scene["view"]} view @param {number} [chosen] */
  function zoom(view, chosen = -1) {
    const { edges, rows } = scene;
    const layout = bandsOf(data, edges, rows, view);
    Object.assign(scene, { view, layout, chosen: layout.detail ? chosen : -1 });
    const whole = view.t0 === 0 && view.t1 === data.total && view.r0 === 0 && view.r1 === rows.length;
    /** @type {HTMLButtonElement} */ (find("#zoom-reset")).disabled = whole;
    find("#waterfall-about").textContent = layout.detail ? "" : aboutOverview();
    const mark = document.querySelector("#straggler-mark");
    if (mark) mark.toggleAttribute("hidden", layout.detail); // names of ranks say it there
    pressOrder(scene.order);
    redraw();
    rememberView(scene);
  }

  function aboutOverview() {
    const count = scene.view.r1 - scene.view.r0;
    const lines = scene.layout.bands.length;
    const binned = lines < count ? `; each line is the slowest of ${Math.ceil(count / lines)}` : "";
    return `${countText(count, "rank")}${binned}. Drag over a part, or press Enter on a line, to see its spans.`;
  }

  /** Zooms time about the middle, or about what is chosen. @param {number} factor */
  function zoomBy(factor) {
    const { chosen, layout, view } = scene;
    const { start, length } = data;
    const middle = layout.detail && chosen >= 0 ? start[chosen] + length[chosen] / 2 : (view.t0 + view.t1) / 2;
    const half = Math.max((view.t1 - view.t0) * factor, 4) / 2;
    const [t0, t1] = fit([middle - half, middle + half], data.total);
    zoom({ ...view, t0, t1 }, chosen);
  }

  const reset = () => zoom({ t0: 0, t1: data.total, r0: 0, r1: scene.rows.length });

  /** @param {number} item @param {{ x: number, y: number } | null} [at] */
  function choose(item, at = null) {
    const changed = item !== scene.chosen;
    scene.chosen = item;
    note(textOf(scene, item), at);
    if (changed) redraw();
  }

  /** @param {number} x @param {number} y */
  function itemAt(x, y) {
    if (x < LEFT) return -1;
    const { edges, layout, view } = scene;
    const at = layout.bands.findIndex((band) => y >= band.top - 1 && y < band.top + band.height + 1);
    if (at < 0 || !layout.detail) return at;
    const band = layout.bands[at];
    const scale = pixelsPerUnit(view, canvas.clientWidth);
    return spanAt(data, edges, band, view.t0 + (x - LEFT) / scale, Math.floor((y - band.top) / LANE), 1.5 / scale);
  }

  /** Zooms into the rectangle that was dragged. @param {NonNullable<Scene["drag"]>} box */
  function zoomInto(box) {
    const { layout, view } = scene;
    const scale = pixelsPerUnit(view, canvas.clientWidth);
    const [left, right] = [Math.min(box.x0, box.x1), Math.max(box.x0, box.x1)];
    const [top, bottom] = [Math.min(box.y0, box.y1), Math.max(box.y0, box.y1)];
    const times = [left, right].map((x) => view.t0 + (x - LEFT) / scale);
    const [t0, t1] = right - left < CLICK ? [view.t0, view.t1] : fit(times, data.total);
    const hit = layout.bands.filter((band) => band.top + band.height > top && band.top < bottom);
    const keep = layout.detail || bottom - top < CLICK || !hit.length;
    zoom({ t0, t1, r0: keep ? view.r0 : hit[0].from, r1: keep ? view.r1 : hit[hit.length - 1].to });
  }

  /** Shows the ranks around a line of the overview. */
  function enter() {
    const { chosen, layout, rows, view } = scene;
    if (layout.detail || chosen < 0) return;
    const r0 = Math.max(0, Math.min(layout.bands[chosen].from - AROUND / 3, rows.length - AROUND));
    zoom({ ...view, r0, r1: Math.min(rows.length, r0 + AROUND) });
  }

  /** @param {number} step forwards through the spans of the ranks in view, or through the lines */
  function walk(step) {
    const { bands, detail } = scene.layout;
    const range = (/** @type {number} */ from, /** @type {number} */ to) =>
      Array.from({ length: to - from }, (_, n) => from + n);
    const items = detail
      ? bands.flatMap(({ row }) => range(scene.edges[row], scene.edges[row + 1]))
      : [...bands.keys()];
    const at = items.indexOf(scene.chosen) + step;
    choose(items[Math.max(0, Math.min(at, items.length - 1))] ?? -1);
  }

  canvas.addEventListener("pointermove", ({ offsetX: x, offsetY: y }) => {
    if (!scene.drag) {
      choose(itemAt(x, y), { x, y });
      return;
    }
    scene.drag = { ...scene.drag, x1: x, y1: y };
    redraw();
  });
  canvas.addEventListener("pointerdown", ({ button, offsetX: x, offsetY: y, pointerId }) => {
    if (button !== 0) return;
    scene.drag = { x0: x, y0: y, x1: x, y1: y };
    // A drag may leave the canvas, and ends where the button is released.
    canvas.setPointerCapture(pointerId);
  });
  canvas.addEventListener("pointerup", ({ offsetX: x, offsetY: y }) => {
    const box = scene.drag;
    scene.drag = null;
    if (!box) return;
    if (Math.abs(box.x1 - box.x0) >= CLICK || Math.abs(box.y1 - box.y0) >= CLICK) {
      zoomInto(box);
      return;
    }
    choose(itemAt(x, y));
    redraw();
  });
  canvas.addEventListener("pointercancel", () => {
    scene.drag = null;
    redraw();
  });
  canvas.addEventListener("pointerleave", () => {
    if (!scene.drag) choose(-1);
  });
  canvas.addEventListener("dblclick", reset);

  const forwards = () => walk(1);
  const backwards = () => walk(-1);
  const zoomIn = () => zoomBy(0.5);
  const zoomOut = () => zoomBy(2);
  /** @type {Record<string, () => void>} */
  const keys = {
    ArrowRight: forwards,
    ArrowDown: forwards,
    ArrowLeft: backwards,
    ArrowUp: backwards,
    Home: () => walk(-Infinity),
    End: () => walk(Infinity),
    "+": zoomIn,
    "=": zoomIn,
    "-": zoomOut,
    0: reset,
    Enter: enter,
    Escape: () => {
      if (scene.chosen >= 0) choose(-1);
      else reset();
    },
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  find("#zoom-in").addEventListener("click", zoomIn);
  find("#zoom-out").addEventListener("click", zoomOut);
  find("#zoom-reset").addEventListener("click", reset);
  const pressOrder = buttonGroup("data-order", (order) => {
    scene.order = order;
    scene.rows = orderOf(data, order);
    zoom(scene.view);
  });
  zoom(recallView(scene));
  return scene.paints;
}

const holder = find("#waterfall");
const canvas = /** @type {HTMLCanvasElement} */ (find("#waterfall-canvas"));
const note = noter(find("#waterfall .drawing"), find("#waterfall-text"));
const address = `checkpoints/${holder.dataset.checkpoint}/timing`;
const slowest = holder.dataset.slow === "" ? null : Number(holder.dataset.slow);

drawn(find("#waterfall-text"), "Waterfall", async () => {
  const data = /** @type {Columns} */ (await api(`${address}/waterfall`));
  const paints = showWaterfall(canvas, data, slowest, note);
  namePhases(
    find("#phase-legend"),
    data.phases.map((name, n) => ({ name, paint: paints[n] })),
  );
});
