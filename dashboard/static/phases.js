// @ts-check
/** The colours of the phases of a save: a phase has the same one in every picture. */
import { colour, fillBox, fillOf, hatch, legend } from "./canvas.js";

/** Colour number of phases in which ranks wait. */
export const WAITS = -1;
/** Colour number of the outermost phase, which contains the others. */
export const FRAME = -2;
/** The outermost phase. */
const OUTERMOST = "save";

/** Colour numbers of the phases that the library records, and of those that are told apart from them. */
const NUMBERS = new Map(
  Object.entries({
    fsync: 0,
    hash: 1,
    write: 2,
    plan: 3,
    flatten: 4,
    publish: 5,
    stage: 6,
    "other phases": 7,
    "late call": 9,
    "write files": 10,
  }),
);
/** The first number of the colours of all other phases, which have stripes, and how many there are. */
const [OTHERS, COUNT] = [11, 13];

/** The colour number of a phase. @param {string} name @param {boolean} waiting whether ranks mostly wait in it */
export function paintOf(name, waiting) {
  if (waiting) return WAITS;
  if (name === OUTERMOST) return FRAME;
  let hash = 0;
  for (const letter of name) hash = (hash * 31 + /** @type {number} */ (letter.codePointAt(0))) % 65_521;
  return NUMBERS.get(name) ?? OTHERS + (hash % COUNT);
}

/**
 * Draws the box of a phase; phases in which ranks wait are pale.
 * @param {CanvasRenderingContext2D} g @param {number} paint @param {number} x @param {number} y @param {number} w
 * @param {number} h
 */
export function drawPhase(g, paint, x, y, w, h) {
  if (paint >= 0 && h >= 6) {
    fillBox(g, paint, x, y, w, h);
    return;
  }
  g.fillStyle = paint >= 0 ? fillOf(paint) : colour(paint === WAITS ? "--soft" : "--grid");
  g.fillRect(x, y, w, h);
  if (paint === WAITS && h >= 6) hatch(g, x, y, w, h, colour("--dim"), 6, 0.35);
}

/** Pixels after which the stripes of all phases repeat. */
const TILE = 12;

/** The fill of areas of a phase. @param {CanvasRenderingContext2D} g @param {number} paint */
export function phaseFill(g, paint) {
  const tile = new OffscreenCanvas(TILE, TILE);
  const inside = /** @type {any} */ (tile.getContext("2d"));
  drawPhase(inside, paint, 0, 0, TILE, TILE);
  return /** @type {CanvasPattern} */ (g.createPattern(tile, "repeat"));
}

/** Phases that a legend names. */
const NAMED = 24;

/**
 * Names the phases of a picture, those in which ranks wait last.
 * @param {HTMLElement} list @param {{ name: string, paint: number }[]} phases
 */
export function namePhases(list, phases) {
  const shown = [...phases].sort((a, b) => Number(a.paint < 0) - Number(b.paint < 0));
  const entries = shown.slice(0, NAMED).map((phase) => ({
    text: phase.paint === WAITS ? `${phase.name} (waiting)` : phase.name,
    draw: (/** @type {CanvasRenderingContext2D} */ g) => drawPhase(g, phase.paint, 0, 0, 13, 13),
  }));
  if (shown.length > NAMED)
    entries.push({ text: `and ${shown.length - NAMED} more phases`, draw: () => {} });
  legend(list, entries);
}
