// @ts-check
/** The shard map: a plane of an array's index space, its regions coloured by the rank or the file that holds them. */
import { api, buttonGroup, bytesText, countText, drawn, find, numberText, recalled, remember } from "./dom.js";
import { colour, fillBox, fillOf, follow, hatch, ink, label, legend, markDamage, selectable } from "./canvas.js";

const holder = find("#map");
const form = /** @type {HTMLFormElement} */ (find("#axes"));
const canvas = /** @type {HTMLCanvasElement} */ (find("#map-canvas"));
const readout = find("#map-text");
const EDGE = { left: 54, top: 22, right: 10, bottom: 6 };

/**
 * @type {{
 *   dims: string[], sizes: number[], y: number | null, x: number | null, at: number[], rows: number,
 *   columns: number, boxes: number[][], files: Record<string, string>, more: number, missing: number,
 *   overlaps: number[][], damaged: number[],
 * } | null}
 */
let map = null;
/** Another program's files say nothing of ranks. */
const foreign = holder.hasAttribute("data-foreign");
let by = foreign || recalled("by") === "file" ? "file" : "rank";
let chosen = -1;
/** The region that was asked for: an offset, then a size per dimension. @type {number[]} */
const asked = JSON.parse(holder.dataset.found ?? "[]");

/** The requested region on the plane as [top, left, bottom, right]; null if it does not intersect the plane. */
function wanted() {
  if (!map || !asked.length || asked.length !== 2 * map.sizes.length) return null;
  const n = map.sizes.length;
  for (let d = 0; d < n; d += 1)
    if (d !== map.y && d !== map.x && (map.at[d] < asked[d] || map.at[d] >= asked[d] + asked[n + d])) return null;
  /** @param {number | null} d */
  const span = (d) => (d === null ? [0, 1] : [asked[d], asked[d] + asked[n + d]]);
  const [down, across] = [span(map.y), span(map.x)];
  return [down[0], across[0], down[1], across[1]];
}

/** @param {number[]} box */
const keyOf = (box) => (by === "rank" ? box[4] : box[5]);

/** @param {number} width */
function heightOf(width) {
  if (!map) return 60;
  const room = width - EDGE.left - EDGE.right;
  const wanted = (map.rows / Math.max(1, map.columns)) * room;
  return EDGE.top + EDGE.bottom + (map.rows === 1 ? 56 : Math.max(130, Math.min(420, wanted)));
}

/** @param {number} width @param {number} height */
function scale(width, height) {
  const m = /** @type {NonNullable<typeof map>} */ (map);
  return {
    x: (width - EDGE.left - EDGE.right) / Math.max(1, m.columns),
    y: (height - EDGE.top - EDGE.bottom) / Math.max(1, m.rows),
  };
}

/** @param {number[]} box @param {{ x: number, y: number }} s */
const place = (box, s) => [
  EDGE.left + box[1] * s.x,
  EDGE.top + box[0] * s.y,
  (box[3] - box[1]) * s.x,
  (box[2] - box[0]) * s.y,
];

/** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height */
function draw(g, width, height) {
  g.clearRect(0, 0, width, height);
  if (!map) return;
  const s = scale(width, height);
  const [w, h] = [map.columns * s.x, map.rows * s.y];
  // what no region covers stays visible: a gap
  g.fillStyle = colour("--card");
  g.fillRect(EDGE.left, EDGE.top, w, h);
  if (!map.more) hatch(g, EDGE.left, EDGE.top, w, h, colour("--gap"), 5, 0.9);
  map.boxes.forEach((box, at) => {
    const [x, y, bw, bh] = place(box, s);
    fillBox(g, keyOf(box), x, y, bw, bh);
    const paint = ink(fillOf(keyOf(box)));
    if (box[8] > 1) hatch(g, x, y, bw, bh, paint, 9, 0.22);
    if (bw > 3 && bh > 3) {
      g.strokeStyle = colour("--card");
      g.lineWidth = 1;
      g.strokeRect(x + 0.5, y + 0.5, bw - 1, bh - 1);
    }
    if (at === chosen) {
      g.strokeStyle = colour("--text");
      g.lineWidth = 3;
      g.strokeRect(x + 1.5, y + 1.5, Math.max(1, bw - 3), Math.max(1, bh - 3));
    }
  });
  for (const at of map.damaged) {
    const [x, y, bw, bh] = place(map.boxes[at], s);
    markDamage(g, x, y, Math.max(2, bw), Math.max(2, bh), "--card");
  }
  for (const cut of map.overlaps) {
    const [x, y, bw, bh] = place(cut, s);
    g.fillStyle = colour("--gap");
    g.fillRect(x, y, Math.max(2, bw), Math.max(2, bh));
    hatch(g, x, y, bw, bh, colour("--card"), 7, 0.8);
  }
  const target = wanted();
  if (target) {
    const [x, y, bw, bh] = place(target, s);
    g.fillStyle = colour("--card");
    g.globalAlpha = 0.62;
    g.beginPath();
    g.rect(EDGE.left, EDGE.top, w, h);
    g.rect(x, y, bw, bh);
    // By even and odd, what is between the two boxes becomes pale.
    g.fill("evenodd");
    g.globalAlpha = 1;
    g.strokeStyle = colour("--text");
    g.lineWidth = 2;
    g.setLineDash([5, 4]);
    g.strokeRect(x, y, Math.max(2, bw), Math.max(2, bh));
    g.setLineDash([]);
  }
  for (const box of map.boxes) name(g, box, place(box, s), target && place(target, s));
  axes(g, s, w, h);
}

/**
 * Writes into a box which rank or file holds it, if there is room.
 * @param {CanvasRenderingContext2D} g @param {number[]} box @param {number[]} at
 * @param {number[] | null} bright what is not pale, null if nothing is
 */
function name(g, box, [x, y, w, h], bright) {
  const texts = by === "rank" ? [`rank ${box[4]}`, `${box[4]}`] : [`file ${box[5]}`, `${box[5]}`];
  const text = texts.find((t) => g.measureText(t).width + 10 <= w);
  const [cx, cy] = [x + w / 2, y + h / 2];
  const pale =
    bright && (cx < bright[0] || cx > bright[0] + bright[2] || cy < bright[1] || cy > bright[1] + bright[3]);
  if (text) label(g, text, x, y, w, h, pale ? colour("--text") : ink(fillOf(keyOf(box))));
}

/**
 * Writes along both edges where regions begin and end, as far as there is room.
 * @param {CanvasRenderingContext2D} g
 * @param {{x: number, y: number}} s
 * @param {number} w @param {number} h
 */
function axes(g, s, w, h) {
  if (!map) return;
  g.fillStyle = colour("--dim");
  g.strokeStyle = colour("--grid");
  g.lineWidth = 1;
  const across = [...new Set(map.boxes.flatMap((box) => [box[1], box[3]]))].sort((a, b) => a - b);
  const down = [...new Set(map.boxes.flatMap((box) => [box[0], box[2]]))].sort((a, b) => a - b);
  let last = -Infinity;
  for (const cut of across) {
    const at = EDGE.left + cut * s.x;
    const text = numberText(cut);
    const half = g.measureText(text).width / 2;
    const x = Math.min(Math.max(at, EDGE.left + half - 4), EDGE.left + w - half + 4);
    if (x - half < last + 8) continue;
    g.textAlign = "center";
    g.fillText(text, x, EDGE.top - 11);
    last = x + half;
  }
  if (map.rows === 1) return;
  last = -Infinity;
  for (const cut of down) {
    const y = Math.min(Math.max(EDGE.top + cut * s.y, EDGE.top + 6), EDGE.top + h - 6);
    if (y < last + 15) continue;
    g.textAlign = "right";
    g.fillText(numberText(cut), EDGE.left - 7, y);
    last = y;
  }
}

const redraw = follow(canvas, { height: heightOf, draw });

/** @param {number} item */
function select(item) {
  chosen = item;
  redraw();
  if (!map) return;
  const box = map.boxes[item];
  if (!box) {
    readout.textContent = summary();
    return;
  }
  const ranges = map.dims.map((name, d) => {
    if (map?.y === d) return `${box[0]}:${box[2]}`;
    return map?.x === d ? `${box[1]}:${box[3]}` : `${map?.at[d]}`;
  });
  const held = box[8] > 1 ? `, held by ${box[8]} ranks` : "";
  const [rank, file, start, stop] = box.slice(4);
  const bytes = `bytes ${numberText(start)} to ${numberText(stop)} (${bytesText(stop - start)})`;
  const where = `[${ranges.join(", ")}]${foreign ? "" : ` written by rank ${rank}${held}`}`;
  const harm = map.damaged.includes(item) ? " · damaged" : "";
  readout.textContent = `${where} · file ${file}, ${bytes}${harm}`;
}

function summary() {
  if (!map) return "";
  const count = countText(map.boxes.length, "region");
  const names = [
    map.y !== null ? `vertical: ${map.dims[map.y]}` : "",
    map.x !== null ? `horizontal: ${map.dims[map.x]}` : "",
  ].filter(Boolean);
  const troubles = [
    map.missing ? `${countText(map.missing, "element is", "elements are")} in no chunk` : "",
    map.overlaps.length ? `chunks overlap in ${countText(map.overlaps.length, "place")}` : "",
  ].filter(Boolean);
  if (map.damaged.length) troubles.push(`${countText(map.damaged.length, "region is", "regions are")} damaged`);
  if (map.more) troubles.push(`${countText(map.more, "more is", "more are")} not drawn`);
  return [count, names.join(", "), ...troubles].join(" · ");
}

selectable(canvas, {
  count: () => map?.boxes.length ?? 0,
  at: (x, y) => {
    if (!map) return -1;
    const s = scale(canvas.clientWidth, canvas.clientHeight);
    const [column, row] = [(x - EDGE.left) / s.x, (y - EDGE.top) / s.y];
    return map.boxes.findIndex((b) => row >= b[0] && row < b[2] && column >= b[1] && column < b[3]);
  },
  select,
});

function describe() {
  if (!map) return;
  const numbers = [...new Set(map.boxes.map(keyOf))].sort((a, b) => a - b);
  const entries = numbers.slice(0, 24).map((number) => ({
    text: by === "rank" ? `rank ${number}` : `file ${number}`,
    draw: (/** @type {CanvasRenderingContext2D} */ g) => fillBox(g, number, 0, 0, 13, 13),
  }));
  if (numbers.length > 24) entries.push({ text: `and ${numbers.length - 24} more`, draw: () => {} });
  if (map.boxes.some((box) => box[8] > 1)) {
    entries.push({ text: "held by several ranks", draw: (g) => hatch(g, 0, 0, 13, 13, colour("--dim"), 4, 1) });
  }
  if (map.missing)
    entries.push({ text: "gap: no chunk holds this", draw: (g) => hatch(g, 0, 0, 13, 13, colour("--gap"), 4, 1) });
  if (map.damaged.length)
    entries.push({ text: "damaged: bytes differ or are missing", draw: (g) => markDamage(g, 0, 0, 13, 13, "--card") });
  if (map.overlaps.length)
    entries.push({
      text: "overlap: two chunks hold this",
      draw: (g) => {
        g.fillStyle = colour("--gap");
        g.fillRect(0, 0, 13, 13);
        hatch(g, 0, 0, 13, 13, colour("--card"), 5, 0.8);
      },
    });
  if (asked.length)
    entries.push({
      text: "dashed: the region that was asked for; all else is pale",
      draw: (g) => {
        g.strokeStyle = colour("--text");
        g.lineWidth = 2;
        g.setLineDash([3, 2]);
        g.strokeRect(1, 1, 11, 11);
      },
    });
  legend(find("#map-legend"), entries);
}

async function load() {
  const data = new FormData(form);
  const leaf = data.get("leaf") ?? holder.dataset.leaf; // a report has several, and one plane of each
  const view = form.hidden || !data.has("y")
    ? {}
    : {
        y: String(data.get("y")),
        x: String(data.get("x")),
        at: data
          .getAll("at")
          .map((n) => Number(n) || 0)
          .join(","),
      };
  map = await api(`checkpoints/${holder.dataset.checkpoint}/leaves/${leaf}/map`, view);
  if (!map) return;
  for (const label of form.querySelectorAll("label[data-dim]")) {
    const dim = Number(label.getAttribute("data-dim"));
    label.toggleAttribute("hidden", dim === map.y || dim === map.x);
  }
  for (const [name, dim] of /** @type {[string, number | null][]} */ ([["y", map.y], ["x", map.x]])) {
    const select = /** @type {HTMLSelectElement | null} */ (form.elements.namedItem(name));
    if (select && dim !== null) select.value = String(dim);
  }
  chosen = -1;
  describe();
  readout.textContent = summary();
  redraw();
}

/** Sets the axis pickers from the address, before the first map is requested. */
function restore() {
  for (const name of ["y", "x"]) {
    const select = /** @type {HTMLSelectElement | null} */ (form.elements.namedItem(name));
    const value = recalled(name);
    if (select && value !== null && [...select.options].some((option) => option.value === value)) select.value = value;
  }
  const at = (recalled("at") ?? "").split(",");
  form.querySelectorAll("input[name=at]").forEach((input, d) => {
    if (/^[0-9]{1,15}$/.test(at[d] ?? "")) /** @type {HTMLInputElement} */ (input).value = at[d];
  });
}

buttonGroup("data-colour", (value) => {
  by = value;
  remember({ by: by === "rank" ? null : by });
  describe();
  redraw();
})(by);
form.addEventListener("input", async () => {
  await drawn(readout, "Map", load);
  if (map) remember({ y: map.y, x: map.x, at: map.at.some(Boolean) ? map.at.join(",") : null });
});
form.addEventListener("submit", (event) => event.preventDefault());
/** Shows the page with a region, as the form does, but the address keeps the rest of the view's state. */
function choose(/** @type {string} */ region) {
  remember({ region: region.trim(), start: null });
  location.reload();
}
document.querySelector("#who")?.addEventListener("submit", (event) => {
  event.preventDefault();
  choose(/** @type {HTMLInputElement} */ (find("#region")).value);
});

/** Where a drag over the map began, and where it is, as [row, column]. @type {number[][] | null} */
let drag = null;

/** The place of the pointer on the plane. @param {PointerEvent} event */
function pointed(event) {
  const m = /** @type {NonNullable<typeof map>} */ (map);
  const s = scale(canvas.clientWidth, canvas.clientHeight);
  /** @param {number} n @param {number} size */
  const inside = (n, size) => Math.max(0, Math.min(size - 1, Math.floor(n)));
  return [inside((event.offsetY - EDGE.top) / s.y, m.rows), inside((event.offsetX - EDGE.left) / s.x, m.columns)];
}

/** The region that a drag covers, as text; of arrays that each rank has, without the dimension of ranks. */
function dragged() {
  if (!map || !drag) return "";
  const { dims, y, x, at } = map;
  const [[top, left], [bottom, right]] = [0, 1].map((end) =>
    [0, 1].map((axis) => (end ? Math.max : Math.min)(...(drag ?? []).map((place) => place[axis]))),
  );
  const ranges = dims.map((name, d) => {
    if (name === "rank") return "";
    if (d === y) return `${top}:${bottom + 1}`;
    return d === x ? `${left}:${right + 1}` : `${at[d]}`;
  });
  return ranges.filter(Boolean).join(", ");
}

canvas.addEventListener("pointerdown", (event) => {
  // a finger scrolls the page
  if (!map?.columns || map.dims[0] === "scalar" || event.pointerType === "touch") return;
  if (!document.querySelector("#who")) return;
  drag = [pointed(event), pointed(event)];
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return;
  drag[1] = pointed(event);
  if (String(drag[0]) !== String(drag[1])) readout.textContent = `choose [${dragged()}]`;
});
canvas.addEventListener("pointerup", () => {
  const moved = drag && String(drag[0]) !== String(drag[1]);
  const region = dragged();
  drag = null;
  if (moved && region) choose(region);
});
restore();
drawn(readout, "Map", load);
