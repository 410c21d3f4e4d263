// @ts-check
/**
 * The matrix of a reshard: one row per rank of the target, one column per file; a darker cell means more bytes read.
 */
import { api, bytesText, copy, find, numberText } from "./dom.js";
import { colour, follow, ink, label, legend, selectable } from "./canvas.js";

const holder = find("#matrix");
const canvas = /** @type {HTMLCanvasElement} */ (find("#matrix-canvas"));
const readout = find("#matrix-text");
const files = Math.max(1, Number(holder.dataset.files));
const ranks = /** @type {number[]} */ (JSON.parse(holder.dataset.ranks ?? "[]"));
const cells = /** @type {number[][]} */ (JSON.parse(holder.dataset.cells ?? "[]"));
const most = cells.reduce((top, cell) => Math.max(top, cell[2]), 1);
const EDGE = { left: 64, top: 22, right: 2, bottom: 2 };
/** @type {Map<number, number>} */
const where = new Map(cells.map(([row, file], at) => [row * files + file, at]));
let chosen = -1;

/** @param {number} nbytes */
const shade = (nbytes) => 0.12 + 0.88 * Math.sqrt(nbytes / most);

const rowHeight = Math.max(2, Math.min(26, 640 / Math.max(1, ranks.length)));

/** @param {number} width */
const columnWidth = (width) => (width - EDGE.left - EDGE.right) / files;

/** @param {CanvasRenderingContext2D} g @param {number} width @param {number} height */
function draw(g, width, height) {
  g.clearRect(0, 0, width, height);
  const w = columnWidth(width);
  const h = rowHeight;
  const gap = w > 6 && h > 6 ? 1 : 0;
  g.fillStyle = colour("--soft");
  g.fillRect(EDGE.left, EDGE.top, w * files, h * ranks.length);
  g.fillStyle = colour("--c0");
  for (const [row, file, nbytes] of cells) {
    g.globalAlpha = shade(nbytes);
    g.fillRect(
      EDGE.left + file * w + gap,
      EDGE.top + row * h + gap,
      Math.max(0.7, w - 2 * gap),
      Math.max(0.7, h - 2 * gap),
    );
  }
  g.globalAlpha = 1;
  if (w > 70 && h > 16)
    for (const [row, file, nbytes] of cells)
      label(
        g,
        bytesText(nbytes),
        EDGE.left + file * w,
        EDGE.top + row * h,
        w,
        h,
        shade(nbytes) > 0.55 ? ink(colour("--c0")) : colour("--text"),
      );
  g.fillStyle = colour("--dim");
  g.textAlign = "right";
  const every = Math.ceil(15 / h);
  ranks.forEach((rank, row) => {
    if (row % every === 0) g.fillText(`rank ${rank}`, EDGE.left - 8, EDGE.top + row * h + Math.max(h, 12) / 2);
  });
  g.textAlign = "center";
  const room = g.measureText(`file ${files}`).width + 10;
  const step = Math.ceil(room / w);
  for (let file = 0; file < files; file += step)
    g.fillText(`file ${file}`, Math.max(EDGE.left + file * w + w / 2, EDGE.left + room / 2 - 5), EDGE.top - 11);
  const cell = cells[chosen];
  if (cell) {
    g.strokeStyle = colour("--text");
    g.lineWidth = 2;
    g.strokeRect(EDGE.left + cell[1] * w, EDGE.top + cell[0] * h, Math.max(2, w), Math.max(2, h));
  }
}

const redraw = follow(canvas, { height: () => EDGE.top + rowHeight * ranks.length + EDGE.bottom, draw });
const quiet = `${numberText(cells.length)} pairs of a rank and a file; the most is ${bytesText(most)}`;
readout.textContent = quiet;

selectable(canvas, {
  count: () => cells.length,
  at: (x, y) => {
    const file = Math.floor((x - EDGE.left) / columnWidth(canvas.clientWidth));
    const row = Math.floor((y - EDGE.top) / rowHeight);
    return file < 0 || file >= files ? -1 : (where.get(row * files + file) ?? -1);
  },
  select: (item) => {
    chosen = item;
    redraw();
    const cell = cells[item];
    readout.textContent = cell ? `rank ${ranks[cell[0]]} reads ${bytesText(cell[2])} of file ${cell[1]}` : quiet;
  },
});

legend(
  find("#matrix-legend"),
  [1, 0.25, 0.02].map((part) => ({
    text: bytesText(part * most),
    draw: (/** @type {CanvasRenderingContext2D} */ g) => {
      g.fillStyle = colour("--c0");
      g.globalAlpha = shade(part * most);
      g.fillRect(0, 0, 13, 13);
      g.globalAlpha = 1;
    },
  })),
);
redraw();

const form = new FormData(/** @type {HTMLFormElement} */ (find("form.target")));
/** @type {NodeListOf<HTMLElement>} */
const buttons = document.querySelectorAll("button[data-rank]");
for (const button of buttons) {
  button.hidden = false;
  button.addEventListener("click", () => {
    const query = Object.fromEntries(["mesh", "names", "place"].map((name) => [name, String(form.get(name) ?? "")]));
    const address = `checkpoints/${holder.dataset.checkpoint}/reshard/snippet`;
    copy(button, api(address, { ...query, rank: button.dataset.rank }).then(({ snippet }) => snippet));
  });
}
