// @ts-check
/** The strips of shards: what part of the tree lies where in each file. Only strips that come into view are fetched. */
import { api, bytesText, find, numberText, reason } from "./dom.js";
import { colour, fillBox, follow, hatch, label, legend, selectable } from "./canvas.js";

/** @typedef {{ file: number, nbytes: number, groups: string[], segments: number[][] }} Strip */

const holder = find("#strips");
const known = find("#strip-legend");

/** The header, the parts with the most bytes in colour, other parts, and padding, which is hatched. @param {CanvasRenderingContext2D} g @param {number} group @param {number} last @param {number} x @param {number} w @param {number} h */
function segment(g, group, last, x, w, h) {
  if (group > 0 && group < last - 1) { fillBox(g, group - 1, x, 0, w, h); return; }
  g.fillStyle = colour(group === last - 1 ? "--c7" : group === last ? "--soft" : "--grid");
  g.fillRect(x, 0, w, h);
  if (group === last) hatch(g, x, 0, w, h, colour("--dim"), 5, 0.8);
}

/** @param {HTMLCanvasElement} canvas @param {Strip} strip */
function show(canvas, strip) {
  const share = Math.max(0.004, Number(canvas.dataset.share) || 1);
  const height = canvas.clientHeight;
  const last = strip.groups.length - 1;
  follow(canvas, {
    height: () => height,
    draw: (g, width) => {
      g.fillStyle = colour("--soft");
      g.fillRect(0, 0, width, height);
      const s = (width * share) / strip.nbytes;
      for (const [start, stop, group] of strip.segments) segment(g, group, last, start * s, Math.max(0.5, (stop - start) * s), height);
    },
  })();
  canvas.addEventListener("pointermove", (event) => {
    const at = (event.offsetX / (canvas.clientWidth * share)) * strip.nbytes;
    const found = strip.segments.find(([start, stop]) => at >= start && at < stop);
    canvas.title = found ? `${strip.groups[found[2]]}: bytes ${found[0]} to ${found[1]} (${bytesText(found[1] - found[0])})` : "";
  });
  if (known.childElementCount) return;
  const used = new Set(strip.segments.map(([, , group]) => group));
  legend(known, strip.groups.map((text, group) => ({ text, group })).filter(({ group }) => used.has(group) || (group && group < last - 1)).map(({ text, group }) => ({
    text, draw: (/** @type {CanvasRenderingContext2D} */ g) => segment(g, group, last, 0, 13, 13),
  })));
}

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    const canvas = /** @type {HTMLCanvasElement} */ (target);
    api(`checkpoints/${holder.dataset.checkpoint}/files/${canvas.dataset.file}/strip`)
      .then((strip) => show(canvas, strip))
      .catch((error) => { canvas.title = `This cannot be drawn: ${reason(error)}`; });
  }
}, { rootMargin: "300px" });
for (const canvas of document.querySelectorAll("canvas.strip")) seen.observe(canvas);

// what each rank wrote ---------------------------------------------------------------------------------------------------

/** @param {HTMLCanvasElement} canvas @param {{ ranks: number[], nbytes: number[], mean: number }} found */
function balance(canvas, found) {
  const readout = find("#balance-text"), most = Math.max(1, ...found.nbytes), count = found.ranks.length;
  const EDGE = { left: 2, right: 2, top: 8, bottom: 20 };
  const quiet = `${numberText(count)} ${count === 1 ? "rank" : "ranks"}; the line is the mean, ${bytesText(found.mean)}`;
  let chosen = -1;
  const redraw = follow(canvas, {
    height: () => 130,
    draw: (g, width, height) => {
      g.clearRect(0, 0, width, height);
      const room = height - EDGE.top - EDGE.bottom, floor = height - EDGE.bottom, w = Math.min(240, (width - EDGE.left - EDGE.right) / count), gap = w > 5 ? Math.min(6, w * 0.15) : 0;
      found.nbytes.forEach((nbytes, at) => {
        const h = Math.max(nbytes ? 1 : 0, (nbytes / most) * room), x = EDGE.left + at * w + gap / 2;
        g.fillStyle = colour(at === chosen ? "--text" : nbytes > 1.2 * found.mean ? "--c5" : "--c0");
        g.fillRect(x, floor - h, Math.max(0.7, w - gap), h);
        g.font = "11px sans-serif";
        label(g, `${found.ranks[at]}`, x, floor + 2, w - gap + 8, 16, colour("--dim"));
      });
      const level = floor - (found.mean / most) * room;
      g.strokeStyle = colour("--text");
      g.setLineDash([5, 4]);
      g.beginPath();
      g.moveTo(EDGE.left, level);
      g.lineTo(EDGE.left + w * count, level);
      g.stroke();
      g.setLineDash([]);
    },
  });
  selectable(canvas, {
    count: () => count,
    at: (x) => { const at = Math.floor((x - EDGE.left) / Math.min(240, (canvas.clientWidth - EDGE.left - EDGE.right) / count)); return at >= 0 && at < count ? at : -1; },
    select: (at) => {
      chosen = at;
      redraw();
      readout.textContent = at < 0 ? quiet : `rank ${found.ranks[at]} wrote ${bytesText(found.nbytes[at])}, ${(found.nbytes[at] / (found.mean || 1)).toFixed(2)}× the mean`;
    },
  });
  readout.textContent = quiet;
  redraw();
}

const bars = /** @type {HTMLCanvasElement | null} */ (document.querySelector("#balance-canvas"));
if (bars) api(`checkpoints/${holder.dataset.checkpoint}/balance`).then((found) => balance(bars, found)).catch((error) => { find("#balance-text").textContent = `This cannot be drawn: ${reason(error)}`; });

// checksums --------------------------------------------------------------------------------------------------------------

/** Compares the checksums of one shard, a part at a time. @param {string} file @param {(text: string, state: string) => void} say @param {() => boolean} stopped */
async function verify(file, say, stopped) {
  let start = /** @type {number | null} */ (0);
  while (start !== null) {
    if (stopped()) { say("stopped", "idle"); return false; }
    const found = /** @type {{ stop: number, nbytes: number, next: number | null, problem: string | null }} */ (await api(`checkpoints/${holder.dataset.checkpoint}/files/${file}/checksums`, { start }));
    if (found.problem) { say(found.problem, "corrupt"); return false; }
    start = found.next;
    say(start === null ? "every checksum matches" : `${bytesText(found.stop)} of ${bytesText(found.nbytes)} compared`, start === null ? "complete" : "idle");
  }
  return true;
}

const start = /** @type {HTMLButtonElement | null} */ (document.querySelector("#verify"));
let going = false;
start?.addEventListener("click", async () => {
  if (going) { going = false; return; }
  going = true;
  const title = start.textContent;
  start.textContent = "Stop";
  for (const slot of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-checksums]"))) {
    try {
      await verify(slot.dataset.checksums ?? "", (text, state) => { slot.textContent = text; slot.className = `checked ${state}`; }, () => !going);
    } catch (error) {
      slot.textContent = `cannot be read: ${reason(error)}`;
      slot.className = "checked corrupt";
    }
    if (!going) break;
  }
  going = false;
  start.textContent = title;
});
if (start) start.hidden = false;
