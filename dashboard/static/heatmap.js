// @ts-check
/** The heat map of a save: the time of each rank, or group of ranks, in each phase. */
import { api, buttonGroup, find, reason, recalled, remember, secondsText } from "./dom.js";
import { colour, follow } from "./canvas.js";
import { imageOf, pooled, ramp } from "./heat.js";
import { noter } from "./tip.js";

/**
 * @typedef {{
 *   by: string, phases: string[], waiting: boolean[], unit: number, labels: string[], medians: number[],
 *   times: number[][], slowest: number[][],
 * }} Heat
 */

const LEFT = 78;
const RIGHT = 8;

/** @param {string} at the save's address in the API */
export async function heatMap(at) {
  const holder = find("#heat");
  const canvas = /** @type {HTMLCanvasElement} */ (find("#heat-canvas"));
  const note = noter(find("#heat .drawing"), find("#heat-text"));
  /** @type {Heat} */
  let data;
  try {
    data = await api(`${at}/heat`, { by: holder.dataset.by });
  } catch (error) {
    note(`The heat map cannot be drawn: ${reason(error)}`);
    return;
  }
  const rows = data.labels.length;
  const columns = data.phases.length;
  if (!rows || !columns) {
    note("There is no phase to draw.");
    return;
  }
  const top = data.times.reduce(
    (most, times, c) => (data.waiting[c] ? most : times.reduce((m, n) => Math.max(m, n), most)),
    1,
  );
  // within a phase, colours go from the median rank's time to three times that
  const share = (/** @type {number} */ n, /** @type {number} */ c) =>
    of === "save" ? n / top : (n / Math.max(1, data.medians[c]) - 1) / 2;
  let of = recalled("scale") === "save" ? "save" : "phase";
  let [row, column] = [-1, -1];
  /** Of each column, as many numbers as there are lines. @type {Float64Array[]} */
  let few = [];
  /** @type {OffscreenCanvas | null} */
  let image = null;
  let painted = "";

  const head = (/** @type {number} */ width) => ((width - LEFT - RIGHT) / columns < 70 ? 74 : 24);
  const body = Math.max(40, Math.min(460, rows * 26));

  /** @param {CanvasRenderingContext2D} g @param {number} width */
  function draw(g, width) {
    const up = head(width);
    const w = width - LEFT - RIGHT;
    const cw = w / columns;
    const ch = body / rows;
    g.clearRect(0, 0, width, up + body + 4);
    const lines = Math.max(1, Math.min(rows, Math.round(body * Math.min(window.devicePixelRatio || 1, 2))));
    if (lines !== few[0]?.length) few = pooled(data.times, lines);
    const state = `${lines} ${of} ${colour("--card")} ${colour("--c1")}`;
    if (!image || state !== painted) {
      painted = state;
      image = imageOf(few, (n, c) => (n < 0 ? -1 : Math.max(0, Math.min(1, share(n, c)))));
    }
    g.imageSmoothingEnabled = false;
    g.drawImage(image, LEFT, up, w, body);
    g.strokeStyle = colour("--card");
    g.lineWidth = 1;
    for (let c = 1; c < columns; c += 1)
      if (cw > 6) {
        g.beginPath();
        g.moveTo(LEFT + c * cw, up);
        g.lineTo(LEFT + c * cw, up + body);
        g.stroke();
      }
    for (let r = 1; r < rows; r += 1)
      if (ch > 6) {
        g.beginPath();
        g.moveTo(LEFT, up + r * ch);
        g.lineTo(LEFT + w, up + r * ch);
        g.stroke();
      }
    g.fillStyle = colour("--dim");
    data.phases.forEach((name, c) => {
      if (cw < 11 && c % Math.ceil(11 / cw)) return;
      g.save();
      g.translate(LEFT + (c + 0.5) * cw, up - 8);
      if (up > 30) {
        g.rotate(-Math.PI / 3);
        g.textAlign = "left";
      } else g.textAlign = "center";
      g.fillText(short(g, name, up > 30 ? 70 : cw - 4), 0, 0);
      g.restore();
    });
    g.textAlign = "left";
    for (let r = 0, free = -99; r < rows; r += 1) {
      const y = up + (r + 0.5) * ch;
      if (y < free) continue;
      g.fillText(short(g, data.labels[r], LEFT - 12), 6, y);
      free = y + Math.max(16, rows > 40 ? 40 : 0);
    }
    if (row >= 0 && column >= 0) {
      g.strokeStyle = colour("--text");
      g.lineWidth = 2;
      g.strokeRect(LEFT + column * cw, up + row * ch - (ch < 3 ? 1 : 0), cw, Math.max(ch, 3));
    }
  }
  const redraw = follow(canvas, { height: (width) => head(width) + body + 4, draw: (g, width) => draw(g, width) });

  /** @param {number} r @param {number} c @param {{ x: number, y: number } | null} [point] */
  function choose(r, c, point = null) {
    const changed = r !== row || c !== column;
    [row, column] = [r, c];
    if (r < 0 || c < 0) note("");
    else {
      const n = data.times[c][r];
      const whose = data.slowest.length ? `, at most: rank ${data.slowest[c][r]}` : "";
      const times = n > 0 && data.medians[c] ? `, ${(n / data.medians[c]).toFixed(1)}× the median rank` : "";
      const time = n < 0 ? "no such phase" : secondsText(n * data.unit) + times + whose;
      note(`${data.labels[r]} · ${data.phases[c]} · ${time}`, point);
    }
    if (changed) redraw();
  }
  canvas.addEventListener("pointermove", (event) => {
    const width = canvas.clientWidth;
    const c = Math.floor(((event.offsetX - LEFT) / (width - LEFT - RIGHT)) * columns);
    const r = Math.floor(((event.offsetY - head(width)) / body) * rows);
    const inside = c >= 0 && c < columns && r >= 0 && r < rows;
    choose(inside ? r : -1, inside ? c : -1, { x: event.offsetX, y: event.offsetY });
  });
  canvas.addEventListener("pointerleave", () => choose(-1, -1));
  canvas.addEventListener("keydown", (event) => {
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
    if (event.key === "Escape") {
      choose(-1, -1);
      return;
    }
    const step = steps[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const within = (/** @type {number} */ n, /** @type {number} */ size) => Math.max(0, Math.min(size - 1, n));
    choose(row < 0 ? 0 : within(row + step[0], rows), column < 0 ? 0 : within(column + step[1], columns));
  });
  buttonGroup("data-scale", (value) => {
    of = value;
    remember({ scale: of === "save" ? of : null });
    ends();
    redraw();
  })(of);
  const ends = () => {
    find("#heat-low").textContent = of === "save" ? "0" : "the median rank";
    find("#heat-high").textContent = of === "save" ? secondsText(top * data.unit) : "3× and more";
  };
  ends();
  scaleBar(find("#heat-scale"));
  redraw();
}

/** The ramp from nothing to the longest. @param {HTMLElement} element */
function scaleBar(element) {
  const canvas = /** @type {HTMLCanvasElement} */ (element);
  follow(canvas, {
    height: () => 10,
    draw: (g, width) => {
      const colours = ramp();
      for (let x = 0; x < width; x += 1) {
        const n = colours[Math.floor((x / width) * 256)];
        g.fillStyle = `rgb(${n & 255} ${(n >> 8) & 255} ${(n >> 16) & 255})`;
        g.fillRect(x, 0, 1.5, 10);
      }
    },
  })();
}

/** Text cut to a width. @param {CanvasRenderingContext2D} g @param {string} text @param {number} room */
function short(g, text, room) {
  if (g.measureText(text).width <= room) return text;
  let end = text.length;
  while (end > 1 && g.measureText(`${text.slice(0, end)}…`).width > room) end -= 1;
  return `${text.slice(0, end)}…`;
}
