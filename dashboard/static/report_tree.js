// @ts-check
/** The search in the tree of a report. */
const box = /** @type {HTMLInputElement | null} */ (document.querySelector("#find"));
if (box) {
  const leaves = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("#tree .leaf")]);
  const parts = /** @type {HTMLDetailsElement[]} */ ([...document.querySelectorAll("#tree details")].reverse());
  box.hidden = false;
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const leaf of leaves) {
      const path = (leaf.dataset.path ?? "").toLowerCase();
      leaf.hidden = !words.every((word) => path.includes(word));
    }
    for (const part of parts) {
      part.hidden = words.length > 0 && !part.querySelector(".leaf:not([hidden])");
      if (words.length) part.open = true;
    }
  });
}
