// @ts-check
/**
 * The strips of shards: which part of the tree is where in each file. A strip is fetched when it comes into view.
 */
import { api, bytesText, drawn, find, make } from "./dom.js";
import { colour, fillBox, follow, hatch, legend } from "./canvas.js";

/** @typedef {{ file: number, nbytes: number, groups: string[], segments: number[][], damaged: number[][] }} Strip */

const holder = find("#strips");
const known = find("#strip-legend");

/**
 * Draws a segment: the header, a part with many bytes in its colour, other parts, or padding, which is hatched.
 * @param {CanvasRenderingContext2D} g @param {number} group @param {number} last @param {number} x
 * @param {number} w @param {number} h
 */
function segment(g, group, last, x, w, h) {
  if (group > 0 && group < last - 1) {
    fillBox(g, group - 1, x, 0, w, h);
    return;
  }
  g.fillStyle = colour(group === last - 1 ? "--c7" : group === last ? "--soft" : "--grid");
  g.fillRect(x, 0, w, h);
  if (group === last) hatch(g, x, 0, w, h, colour("--dim"), 5, 0.8);
}

/**
 * Marks damaged bytes.
 * @param {CanvasRenderingContext2D} g @param {number} x @param {number} w @param {number} h
 */
function mark(g, x, w, h) {
  g.fillStyle = colour("--gap");
  g.fillRect(x, 0, w, h);
  hatch(g, x, 0, w, h, colour("--card"), 6, 0.8);
}

/** The groups that are in a strip. @type {Set<number>} */
const used = new Set();

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
      for (const [start, stop, group] of strip.segments)
        segment(g, group, last, start * s, Math.max(0.5, (stop - start) * s), height);
      for (const [start, stop] of strip.damaged) mark(g, start * s, Math.max(2, (stop - start) * s), height);
    },
  })();
  canvas.addEventListener("pointermove", (event) => {
    const at = (event.offsetX / (canvas.clientWidth * share)) * strip.nbytes;
    const found = strip.segments.find(([start, stop]) => at >= start && at < stop);
    const bad = strip.damaged.some(([start, stop]) => at >= start && at < stop);
    canvas.title = found
      ? `${bad ? "damaged: " : ""}${strip.groups[found[2]]}: ` +
        `bytes ${found[0]} to ${found[1]} (${bytesText(found[1] - found[0])})`
      : "";
  });
  const before = used.size;
  for (const [, , group] of strip.segments) used.add(group);
  const marked = known.dataset.damaged;
  if (strip.damaged.length) known.dataset.damaged = "1";
  if (known.childElementCount && used.size === before && known.dataset.damaged === marked) return;
  legend(
    known,
    [...strip.groups
      .map((text, group) => ({ text, group }))
      .filter(({ group }) => used.has(group) || (group && group < last - 1))
      .map(({ text, group }) => ({
        text,
        draw: (/** @type {CanvasRenderingContext2D} */ g) => segment(g, group, last, 0, 13, 13),
      })),
      ...(known.dataset.damaged
        ? [{ text: "damaged", draw: (/** @type {CanvasRenderingContext2D} */ g) => mark(g, 0, 13, 13) }]
        : [])],
  );
}

const seen = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(target);
      const canvas = /** @type {HTMLCanvasElement} */ (target);
      const state = make("p", { class: "strip-state dim", role: "status" });
      canvas.after(state);
      drawn(state, "Bytes", async () => {
        show(canvas, await api(`checkpoints/${holder.dataset.checkpoint}/files/${canvas.dataset.file}/strip`));
        state.remove();
      });
    }
  },
  { rootMargin: "300px" },
);
for (const canvas of document.querySelectorAll("canvas.strip")) seen.observe(canvas);
