// @ts-check
/** The treemap: one area per leaf, in proportion to its bytes, inside its part of the tree, rank, file or dtype. */
import { api, base, buttonGroup, bytesText, countText, find, make, numberText } from "./dom.js";
import { drawn, isReport, recalled, remember, tableOf, visible } from "./dom.js";
import { bytesColumn, numbersColumn } from "./columns.js";
import { colour, fillName, fillOf, follow, ink } from "./canvas.js";
import { legend, markDamage, noter, pixelOf, rgbOf, selectable } from "./canvas.js";
import { hierarchy, treemap } from "./vendor/d3-hierarchy-3.1.3.min.js";

/**
 * @typedef {{
 *   by: string, node: string, path: string, total: number, above: string[][], parents: number[], names: string[],
 *   nbytes: number[], leaves: number[], nodes: string[], more: number[],
 *   damaged: number[],
 * }} Page
 */
/**
 * @typedef {{
 *   x0: number, y0: number, x1: number, y1: number, box: number, part: number, depth: number, shade: number,
 * }} Area
 */

const holder = find("#treemap");
const canvas = /** @type {HTMLCanvasElement} */ (find("#treemap-canvas"));
const readout = find("#treemap-text");
const trail = find("#treemap-trail");
const checkpoint = holder.dataset.checkpoint ?? "";
const TITLE = 17;
const LINE = 15; // pixels of a line of a name
const LISTED = 500; // areas in the table
const BOXES = 200; // of a map of the tree: a click shows what is in one
const NAMED = 12; // parts in the legend

/** @type {Page | null} */
let page = null;
/** Leaves of the picture, largest first, and the frames around them. @type {{ leaves: Area[], frames: Area[] }} */
let areas = { leaves: [], frames: [] };
const picture = document.createElement("canvas");
let painted = "";
let chosen = -1;
let theme = 0;
document.addEventListener("theme", () => {
  theme += 1;
});

/** @param {number} box */
function nameOf(box) {
  if (!page) return "";
  if (page.more[box]) return page.names[box] || countText(page.more[box], "smaller one");
  return page.names[box] || "(all)";
}

/** The names that several areas have: alone, they say nothing. @type {Set<string>} */
let repeated = new Set();

/** What the names of all boxes inside a box begin with, up to a separator. @type {Map<number, string>} */
let starts = new Map();

/**
 * What all names begin with, up to a separator.
 * @param {string[]} names
 */
function commonStart(names) {
  let [start = ""] = names;
  for (const name of names) while (!name.startsWith(start)) start = start.slice(0, -1);
  return start.replace(/[^./_]*$/, "");
}

/**
 * The lines of a box: where it is, if others have its name too, and its name.
 * @param {number} box
 */
function linesOf(box) {
  const name = nameOf(box);
  if (page?.more[box] && name.includes(" … ")) {
    const start = starts.get(page.parents[box]) ?? "";
    return name.split(/(?<= …) /).map((end) => (end.startsWith(start) ? end.slice(start.length) : end));
  }
  if (!page || !repeated.has(name) || page.parents[box] <= 0) return [name];
  return [nameOf(page.parents[box]), name];
}

/** The names from the picture's root to a box. @param {number} box */
function pathOf(box) {
  const names = [];
  for (let at = box; page && at > 0; at = page.parents[at]) names.unshift(nameOf(at));
  return names.join(" / ");
}

/** Computes the areas of a picture. @param {number} width @param {number} height */
function arrange(width, height) {
  if (!page) return;
  const { parents, nbytes } = page;
  /** The boxes inside each box. @type {number[][]} */
  const inner = [];
  parents.forEach((parent, box) => {
    if (parent >= 0) (inner[parent] ??= []).push(box);
  });
  starts = new Map();
  inner.forEach((boxes, box) => starts.set(box, commonStart(boxes.flatMap((one) => nameOf(one).split(" … ")))));
  const root = hierarchy(0, (box) => inner[box]);
  root.sum((box) => (inner[box] ? 0 : nbytes[box]));
  const layout = /** @type {typeof treemap<number>} */ (treemap)().size([width, height]).paddingInner(1).round(true);
  layout.paddingTop((node) => (node.depth === 1 && node.children ? TITLE : 0))(root);
  areas = { leaves: [], frames: [] };
  let part = -1;
  const shades = new Uint8Array(parents.length); // every second child is drawn paler
  root.eachBefore(({ x0, y0, x1, y1, depth, children, data: box }) => {
    if (depth === 1) part += 1;
    if (depth) inner[box]?.forEach((child, at) => (shades[child] = at % 2));
    const area = { x0, y0, x1, y1, box, part: Math.max(0, part), depth, shade: shades[box] };
    if (!children) areas.leaves.push(area);
    else if (depth === 1) areas.frames.push(area);
  });
  areas.leaves.sort((a, b) => nbytes[b.box] - nbytes[a.box]);
  const seen = new Set();
  repeated = new Set();
  for (const name of areas.leaves.map(({ box }) => nameOf(box))) (seen.has(name) ? repeated : seen).add(name);
}

/** The swatch of a colour beside its paler shade. @param {CanvasRenderingContext2D} g */
function shades(g) {
  g.fillStyle = fillOf(0);
  g.fillRect(0, 0, 6.5, 13);
  g.globalAlpha = 0.82;
  g.fillRect(6.5, 0, 6.5, 13);
  g.globalAlpha = 1;
}

/** Shows which part of the map has which colour. */
function describe() {
  if (!page) return;
  const { parents } = page;
  const parts = parents.flatMap((parent, box) => (parent === 0 ? [box] : []));
  const entries = parts.map((box, part) => ({
    text: nameOf(box),
    draw: (/** @type {CanvasRenderingContext2D} */ g) => {
      g.fillStyle = fillOf(part);
      g.fillRect(0, 0, 13, 13);
    },
  }));
  const shown = entries.slice(0, NAMED);
  if (entries.length > NAMED)
    shown.push({ text: `and ${numberText(entries.length - NAMED)} more, in these colours again`, draw: () => {} });
  if (parts.length !== areas.leaves.length) shown.push({ text: "two shades: neighbours", draw: shades });
  if (page?.damaged.length)
    shown.push({
      text: "damaged leaf",
      draw: (/** @type {CanvasRenderingContext2D} */ g) => markDamage(g, 0, 0, 13, 13, "--gap"),
    });
  legend(find("#treemap-legend"), shown);
}

/**
 * Fills the areas, pixel by pixel: as rectangles of a canvas, 100,000 of them take several times as long.
 * @param {CanvasRenderingContext2D} g
 */
function fill(g) {
  const { width, height } = g.canvas;
  const ratio = g.getTransform().a;
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  /** The pixel of each part and shade. @type {number[]} */
  const inks = [];
  // the larger ones last, over those that have no width of their own
  for (const { x0, y0, x1, y1, part, shade } of areas.leaves.toReversed()) {
    const pixel = (inks[2 * part + shade] ??= pixelOf(rgbOf(fillName(part)), shade ? 0.82 : 1));
    const left = Math.min(width - 1, Math.round(x0 * ratio));
    const right = Math.max(left + 1, Math.round(x1 * ratio));
    const bottom = Math.max(Math.round(y0 * ratio) + 1, Math.round(y1 * ratio));
    for (let y = Math.round(y0 * ratio); y < bottom; y += 1) pixels.fill(pixel, y * width + left, y * width + right);
  }
  g.putImageData(image, 0, 0);
}

/**
 * @param {CanvasRenderingContext2D} g @param {string} text @param {number} x @param {number} y @param {number} room
 */
function write(g, text, x, y, room) {
  if (room < 24) return;
  let shown = visible(text);
  if (g.measureText(shown).width > room) {
    const keep = Math.floor((shown.length * (room - 14)) / g.measureText(shown).width);
    if (keep < 7) return; // the end of a word says nothing
    shown = `…${shown.slice(-keep).replace(/^[./]/, "")}`; // leaves differ in the end of their names
  }
  g.fillText(shown, x, y);
}

/**
 * Breaks a name into lines behind its dots, slashes and underscores.
 * @param {CanvasRenderingContext2D} g @param {string} text @param {number} room
 */
function broken(g, text, room) {
  const lines = [""];
  for (const part of text.split(/(?<=[./_ ])/)) {
    const last = lines.length - 1;
    if (!lines[last] || g.measureText(visible(lines[last] + part)).width <= room) lines[last] += part;
    else lines.push(part);
  }
  return lines;
}

/** Draws the areas and their names. @param {CanvasRenderingContext2D} g */
function paint(g) {
  fill(g);
  g.textBaseline = "middle";
  g.textAlign = "left";
  for (const area of areas.leaves.slice(0, 400)) {
    const w = area.x1 - area.x0;
    const h = area.y1 - area.y0;
    if (w < 50 || h < 16) continue;
    g.fillStyle = ink(fillOf(area.part));
    const lines = linesOf(area.box);
    if (h < 34) {
      write(g, lines.join("/"), area.x0 + 5, area.y0 + h / 2, w - 10);
      continue;
    }
    const room = Math.floor((h - 4) / LINE);
    let shown = lines.flatMap((line) => broken(g, line, w - 10));
    // of a range that does not fit, how its two names begin tells more than how they end
    if (shown.length > room && lines.length > 1 && page?.more[area.box])
      shown = lines.map((line, at) => broken(g, line, w - 10)[0] + (at ? "" : " …"));
    shown = shown.slice(-room);
    if (h >= 4 + LINE * (shown.length + 1)) shown.push(bytesText(page?.nbytes[area.box] ?? 0));
    shown.forEach((line, at) => {
      write(g, line, area.x0 + 5, area.y0 + 12 + LINE * at, w - 10);
    });
  }
  const harmed = new Set(page?.damaged);
  for (const { box, x0, y0, x1, y1 } of harmed.size ? areas.leaves : [])
    if (harmed.has(box)) markDamage(g, x0, y0, Math.max(2, x1 - x0), Math.max(2, y1 - y0), "--gap");
  g.fillStyle = colour("--text");
  for (const area of areas.frames)
    write(
      g,
      `${nameOf(area.box)} · ${bytesText(page?.nbytes[area.box] ?? 0)}`,
      area.x0 + 3,
      area.y0 + TITLE / 2 + 1,
      area.x1 - area.x0 - 6,
    );
}

/** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height */
function draw(g, width, height) {
  const state = `${width} ${height} ${theme} ${page?.by} ${page?.node}`;
  if (state !== painted) {
    painted = state;
    arrange(width, height);
    picture.width = canvas.width;
    picture.height = canvas.height;
    const to = picture.getContext("2d");
    if (to) {
      to.setTransform(g.getTransform());
      to.font = g.font;
      paint(to);
    }
  }
  g.clearRect(0, 0, width, height);
  if (page?.total) g.drawImage(picture, 0, 0, width, height);
  const area = areas.leaves[chosen];
  if (area) {
    g.strokeStyle = colour("--text");
    g.lineWidth = 2;
    g.strokeRect(area.x0 + 1, area.y0 + 1, Math.max(1, area.x1 - area.x0 - 2), Math.max(1, area.y1 - area.y0 - 2));
  }
}

const redraw = follow(canvas, { height: (width) => (width < 500 ? 320 : 340), draw });

function summary() {
  if (!page) return "";
  return page.total
    ? `${bytesText(page.total)} in ${countText(areas.leaves.length, "area")}${isReport ? "" : "; a click opens one"}`
    : "No arrays here.";
}

const note = noter(/** @type {HTMLElement} */ (canvas.parentElement), readout);

selectable(canvas, {
  count: () => areas.leaves.length,
  at: (x, y) => areas.leaves.findIndex((a) => x >= a.x0 && x < a.x1 && y >= a.y0 && y < a.y1),
  select: (item, point) => {
    chosen = item;
    redraw();
    const area = areas.leaves[item];
    if (!area || !page) {
      note(summary());
      return;
    }
    const nbytes = page.nbytes[area.box];
    const percent = ((100 * nbytes) / page.total).toPrecision(3);
    const harm = page.damaged.includes(area.box) ? " · damaged" : "";
    const count = page.more[area.box] && page.names[area.box] ? `${countText(page.more[area.box], "node")}, ` : "";
    note(`${pathOf(area.box)} · ${count}${bytesText(nbytes)}, ${percent} %${harm}`, point);
  },
});

/**
 * Opens what an area stands for: the page of a leaf, or the part of the tree whose smaller leaves it combines.
 * @param {number} item
 */
function open(item) {
  const area = areas.leaves[item];
  if (!page || !area || isReport) return;
  if (page.leaves[area.box] >= 0) location.assign(`${base}checkpoints/${checkpoint}/leaves/${page.leaves[area.box]}`);
  else if (page.by === "tree" && page.nodes[area.box] !== page.node) show("tree", page.nodes[area.box]);
}

canvas.addEventListener("click", (event) => {
  const frame = areas.frames.find(
    (a) => event.offsetX >= a.x0 && event.offsetX < a.x1 && event.offsetY >= a.y0 && event.offsetY < a.y0 + TITLE,
  );
  if (frame && !isReport && page?.by === "tree" && page.leaves[frame.box] < 0) show("tree", page.nodes[frame.box]);
  else
    open(
      areas.leaves.findIndex(
        (a) => event.offsetX >= a.x0 && event.offsetX < a.x1 && event.offsetY >= a.y0 && event.offsetY < a.y1,
      ),
    );
});
canvas.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && chosen >= 0) {
    event.preventDefault();
    open(chosen);
  }
});

/** Shows links to the nodes above. */
function crumbs() {
  if (!page) return;
  const steps = page.above.map(([node, name]) => {
    const button = make("button", { type: "button", class: "link" }, name || "all");
    button.addEventListener("click", () => show("tree", node));
    return button;
  });
  trail.replaceChildren(
    ...steps.flatMap((step) => [step, document.createTextNode(" / ")]),
    page.node ? make("span", {}, page.path.split("/").pop() ?? "") : "",
  );
}

/** The link of a box: to a leaf, or to a part of the tree. @param {Page} page @param {number} box */
function hrefOf({ by, node, leaves, nodes }, box) {
  if (isReport) return null;
  if (leaves[box] >= 0) return `${base}checkpoints/${checkpoint}/leaves/${leaves[box]}`;
  return by === "tree" && nodes[box] !== node ? `?map=tree&mapnode=${nodes[box]}` : null;
}

/** Shows the largest boxes as a table. @param {Page} page */
function showTable(page) {
  const { parents, nbytes, total } = page;
  const first = parents.flatMap((parent, box) => (parent === 0 ? [box] : []));
  const boxes = [...first, ...areas.leaves.map((a) => a.box).filter((box) => parents[box] !== 0)].slice(0, LISTED);
  const head = [make("th", {}, "Where"), make("th", { class: "n" }, "Bytes"), make("th", { class: "n" }, "Share")];
  const share = numbersColumn(boxes.map((box) => (100 * nbytes[box]) / (total || 1)), 3);
  const size = bytesColumn(boxes.map((box) => nbytes[box]));
  const rows = boxes.map((box) => {
    const href = hrefOf(page, box);
    const text = pathOf(box);
    return [
      make(
        "th",
        { scope: "row", class: "mono" },
        href ? make("a", { href }, text) : text,
        page.damaged.includes(box) ? make("span", { class: "harm" }, "damaged") : null,
      ),
      make("td", { class: "n" }, size(nbytes[box])),
      make("td", { class: "n" }, `${share((100 * nbytes[box]) / (total || 1))} %`),
    ];
  });
  find("#treemap-table").replaceChildren(tableOf("small", head, rows));
}

/** @param {string} by @param {string} node */
async function show(by, node) {
  press(by);
  const query = { by, node, count: by === "tree" && !isReport ? BOXES : null };
  await drawn(readout, "Map", async () => {
    page = /** @type {Page} */ (await api(`checkpoints/${checkpoint}/treemap`, query));
    showPage(by, node);
  });
}

/** @param {string} by @param {string} node */
function showPage(by, node) {
  if (!page) return;
  remember({ map: by === "tree" ? null : by, mapnode: node });
  chosen = -1;
  painted = "";
  crumbs();
  redraw();
  describe();
  showTable(page);
  readout.textContent = summary();
}

const press = buttonGroup("data-by", (by) => show(by, ""));
const wanted = recalled("map");
const known = [...document.querySelectorAll("button[data-by]")].map((button) => button.getAttribute("data-by"));
show(
  wanted && known.includes(wanted) ? wanted : "tree",
  /^[0-9.:-]{1,1000}$/.test(recalled("mapnode") ?? "") ? (recalled("mapnode") ?? "") : "",
);
