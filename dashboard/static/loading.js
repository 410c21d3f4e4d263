// @ts-check
/**
 * The page of a large index that is read for the first time: shows the progress, and opens the page at the end.
 */

import { base, find, numberText, reason, secondsText } from "./dom.js";

const checkpoint = find("#loading").dataset.checkpoint;
const text = find("#loading-text");
const bar = /** @type {HTMLProgressElement} */ (find("#loading-bar"));

/** @param {{ phase: string, done: number, total: number, share: number | null, seconds: number }} progress */
function show({ phase, done, total, share, seconds }) {
  const what =
    phase === "write"
      ? `${numberText(done)} of ${numberText(total)} leaves are read`
      : phase === "wait"
        ? "Another index is read first"
        : "The index is being decoded";
  text.textContent = `${what}, for ${secondsText(seconds)}.`;
  if (share === null) bar.removeAttribute("value");
  else bar.value = share;
}

async function watch() {
  for (;;) {
    const response = await fetch(`${base}api/v1/checkpoints/${checkpoint}/tree`, {
      headers: { accept: "application/json" },
    });
    if (response.status !== 202) return location.reload();
    show((await response.json()).loading);
    await new Promise((resolve) => setTimeout(resolve, 250));
  }
}

watch().catch((error) => {
  text.textContent = `This did not work: ${reason(error)}`;
});
