// @ts-check
/** Canvases that follow the width of the window and the colour scheme, colours of data, patterns, and legends. */
import { make, visible } from "./dom.js";

const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);
/** @type {Map<string, string>} */
const known = new Map();
document.addEventListener("theme", () => known.clear());

/** A colour of the sheet as `rgb(r, g, b)`, in the scheme that is shown. @param {string} name */
export function colour(name) {
  let found = known.get(name);
  if (found === undefined) {
    // The computed style of an element alone has a variable of the sheet as `rgb(...)`.
    probe.style.color = `var(${name})`;
    found = getComputedStyle(probe).color;
    known.set(name, found);
  }
  return found;
}

/** Red, green and blue of a colour of the sheet, from 0 to 255. @param {string} name */
export const rgbOf = (name) => (colour(name).match(/[\d.]+/g) ?? ["0", "0", "0"]).slice(0, 3).map(Number);

/** A colour as the four bytes of a pixel. @param {number[]} rgb @param {number} [alpha] */
export const pixelOf = ([r, g, b], alpha = 1) => ((Math.round(255 * alpha) << 24) | (b << 16) | (g << 8) | r) >>> 0;

/** An image of pixels, row by row. @param {ArrayLike<number>} pixels @param {number} width */
export function imageOf(pixels, width) {
  const image = new ImageData(width, pixels.length / width);
  new Uint32Array(image.data.buffer).set(pixels);
  const sheet = new OffscreenCanvas(width, image.height);
  /** @type {OffscreenCanvasRenderingContext2D} */ (sheet.getContext("2d")).putImageData(image, 0, 0);
  return sheet;
}

const COLOURS = 8;

/** Black or white, whichever reads better on a colour. @param {string} fill */
export function ink(fill) {
  // relative luminance of WCAG 2: above 0.18 black has the higher contrast
  const [r, g, b] = (fill.match(/[\d.]+/g) ?? []).map((n) => (Number(n) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#10151f" : "#ffffff";
}

/** The name of the colour of a number. @param {number} number */
export const fillName = (number) => `--c${number % COLOURS}`;

/** @param {number} number */
export const fillOf = (number) => colour(fillName(number));

/**
 * Fills a box with the colour of a number. After eight, colours repeat with stripes: the first 24 are all different.
 * @param {CanvasRenderingContext2D} g @param {number} number
 * @param {number} x @param {number} y @param {number} w @param {number} h
 */
export function fillBox(g, number, x, y, w, h) {
  const fill = fillOf(number);
  g.fillStyle = fill;
  g.fillRect(x, y, w, h);
  const round = Math.floor(number / COLOURS) % 3;
  if (round) hatch(g, x, y, w, h, ink(fill), round === 1 ? 6 : 3, 0.35);
}

/**
 * Draws diagonal lines inside a box.
 * @param {CanvasRenderingContext2D} g @param {number} x @param {number} y @param {number} w @param {number} h
 * @param {string} stroke @param {number} step @param {number} alpha
 */
export function hatch(g, x, y, w, h, stroke, step, alpha) {
  if (w < 2 || h < 2) return;
  g.save();
  g.beginPath();
  g.rect(x, y, w, h);
  g.clip();
  g.strokeStyle = stroke;
  g.globalAlpha = alpha;
  g.lineWidth = 1;
  g.beginPath();
  for (let at = Math.floor((x - h) / step) * step; at < x + w; at += step) {
    g.moveTo(at, y + h);
    g.lineTo(at + h, y);
  }
  g.stroke();
  g.restore();
}

/**
 * Marks what is damaged: hatched, in a frame.
 * @param {CanvasRenderingContext2D} g @param {number} x @param {number} y @param {number} w @param {number} h
 * @param {string} lines the name of the colour of the lines
 */
export function markDamage(g, x, y, w, h, lines) {
  hatch(g, x, y, w, h, colour(lines), 6, 0.9);
  g.strokeStyle = colour("--gap");
  g.lineWidth = 2;
  g.strokeRect(x + 1, y + 1, Math.max(0, w - 2), Math.max(0, h - 2));
}

/**
 * Draws a canvas whenever its width or the colours change; sizes are in CSS pixels. Returns what draws it again.
 * @param {HTMLCanvasElement} canvas
 * @param {{
 *   height: (width: number) => number,
 *   draw: (g: CanvasRenderingContext2D, width: number, height: number) => void,
 * }} picture
 */
export function follow(canvas, picture) {
  const redraw = () => {
    const width = canvas.clientWidth;
    if (!width) return;
    const height = Math.max(1, Math.round(picture.height(width)));
    const ratio = Math.min(window.devicePixelRatio || 1, 3);
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const g = canvas.getContext("2d");
    if (!g) return;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    g.textBaseline = "middle";
    picture.draw(g, width, height);
  };
  let last = 0;
  new ResizeObserver(() => {
    // Drawing sets the height, of which the observer tells too.
    if (canvas.clientWidth !== last) {
      last = canvas.clientWidth;
      redraw();
    }
  }).observe(canvas);
  document.addEventListener("theme", redraw);
  return redraw;
}

/**
 * Fills a list with a legend; each swatch is drawn by the function that draws the boxes of the picture.
 * @param {HTMLElement} list
 * @param {{ text: string, draw: (g: CanvasRenderingContext2D) => void }[]} entries
 */
export function legend(list, entries) {
  list.replaceChildren();
  for (const entry of entries) {
    const swatch = /** @type {HTMLCanvasElement} */ (make("canvas", { "aria-hidden": "true" }));
    list.append(make("li", {}, swatch, entry.text));
    follow(swatch, { height: () => 13, draw: (g) => entry.draw(g) })();
  }
}

/**
 * Writes text into a box, if it fits.
 * @param {CanvasRenderingContext2D} g @param {string} text
 * @param {number} x @param {number} y @param {number} w @param {number} h @param {string} fill
 */
export function label(g, text, x, y, w, h, fill) {
  if (h < 13 || g.measureText(text).width + 10 > w) return;
  g.fillStyle = fill;
  g.textAlign = "center";
  g.fillText(text, x + w / 2, y + h / 2 + 0.5);
}

/**
 * Lets the items of a picture be pointed at, and walked through with the arrow keys; `select` gets the pointer's place.
 * @param {HTMLElement} holder gets the keys
 * @param {{
 *   count: () => number, at: (x: number, y: number) => number,
 *   select: (item: number, point: { x: number, y: number } | null) => void,
 * }} items
 * @param {HTMLElement} [picture] gets the pointer, if that is not the holder
 */
export function selectable(holder, items, picture = holder) {
  let current = -1;
  /** @param {number} item @param {{ x: number, y: number } | null} [point] */
  const go = (item, point = null) => {
    if (item !== current) {
      current = item;
      items.select(item, point);
    }
  };
  for (const kind of /** @type {const} */ (["pointermove", "pointerdown"]))
    picture.addEventListener(kind, ({ offsetX: x, offsetY: y }) => go(items.at(x, y), { x, y }));
  picture.addEventListener("pointerleave", () => go(-1));
  holder.addEventListener("keydown", (event) => {
    const last = items.count() - 1;
    const steps = {
      ArrowRight: current + 1,
      ArrowDown: current + 1,
      ArrowLeft: current - 1,
      ArrowUp: current - 1,
      Home: 0,
      End: last,
      Escape: -1,
    };
    if (!(event.key in steps) || last < 0) return;
    event.preventDefault();
    const next = steps[/** @type {keyof typeof steps} */ (event.key)];
    go(event.key === "Escape" ? -1 : Math.max(0, Math.min(last, next)));
  });
}

/**
 * Returns what shows a text in a tooltip that follows the pointer over a picture, and below it for keyboard users.
 * @param {HTMLElement} holder of the picture, positioned
 * @param {HTMLElement} readout
 */
export function noter(holder, readout) {
  const tip = make("div", { class: "tip", "aria-hidden": "true", hidden: true });
  holder.append(tip);
  /** @param {string} text @param {{ x: number, y: number } | null} [at] */
  return (text, at = null) => {
    readout.textContent = text ? visible(text) : "\u00a0";
    tip.hidden = !text || !at;
    if (!text || !at) return;
    tip.textContent = visible(text);
    const room = holder.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(0, Math.min(at.x + 14, room))}px`;
    tip.style.top = `${at.y + 18}px`;
  };
}
