// @ts-check
/** Compares the checksums of the shards on the page, a part at a time; the button starts and stops it. */
import { api, bytesText, find, reason } from "./dom.js";

/** @typedef {{ stop: number, nbytes: number, next: number | null, problem: string | null }} Compared */

const checkpoint = find("#strips").dataset.checkpoint;
const button = /** @type {HTMLButtonElement} */ (find("#verify"));
const title = button.textContent;
let running = false;

/** @param {HTMLElement} slot @param {string} text @param {"idle" | "complete" | "corrupt"} state */
function show(slot, text, state) {
  slot.textContent = text;
  slot.className = `checked ${state}`;
}

/** @param {HTMLElement} slot where the result of one shard is shown */
async function verify(slot) {
  const address = `checkpoints/${checkpoint}/files/${slot.dataset.checksums}/checksums`;
  for (let start = /** @type {number | null} */ (0); start !== null;) {
    if (!running) return show(slot, "stopped", "idle");
    const found = /** @type {Compared} */ (await api(address, { start }));
    if (found.problem) return show(slot, found.problem, "corrupt");
    show(slot, `${bytesText(found.stop)} of ${bytesText(found.nbytes)} compared`, "idle");
    start = found.next;
  }
  show(slot, "every checksum matches", "complete");
}

button.addEventListener("click", async () => {
  running = !running;
  if (!running) return;
  button.textContent = "Stop";
  for (const slot of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-checksums]"))) {
    await verify(slot).catch((error) => show(slot, `cannot be read: ${reason(error)}`, "corrupt"));
    if (!running) break;
  }
  running = false;
  button.textContent = title;
});
button.hidden = false;
