// @ts-check
/** A tooltip that follows the pointer over a picture; the same text is below the picture for keyboard users. */
import { make, visible } from "./dom.js";

/**
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
