// @ts-check
/** The head of a leaf's page: its copy buttons, and links to its neighbours and to the tree that keep the view. */
import { api, copiers, find, recalled } from "./dom.js";

const part = find("#copy");
part.hidden = false;
/** The position of the rank that the shard map shows, where each rank has an array of its own. */
const which = () => {
  const at = /** @type {HTMLInputElement | null} */ (document.querySelector("#axes input[name=at]"));
  return part.hasAttribute("data-ranks") ? (at?.value ?? "") : "";
};
copiers(
  part,
  () => JSON.parse(part.dataset.path ?? '""'),
  () =>
    api(`checkpoints/${part.dataset.checkpoint}/leaves/${part.dataset.leaf}/snippet`, {
      region: document.querySelector("#map")?.getAttribute("data-region") ?? "",
      which: which(),
    }),
);

/** What of the view fits any leaf. */
const KEPT = ["by", "peek"];

/** @type {NodeListOf<HTMLAnchorElement>} */
const neighbours = document.querySelectorAll(".beside a");
/** Leads to the neighbour with the same view. @param {HTMLAnchorElement} link */
function keepView(link) {
  const address = new URL(link.href);
  for (const name of KEPT) {
    const value = recalled(name);
    if (value === null) address.searchParams.delete(name);
    else address.searchParams.set(name, value);
  }
  link.href = address.href;
}
for (const link of neighbours) link.addEventListener("click", () => keepView(link));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target instanceof Element && event.target.matches("input, select, textarea")) return;
  const rel = { "[": "prev", "]": "next" }[event.key];
  if (rel) [...neighbours].find((link) => link.rel === rel)?.click();
});

try {
  const tree = /** @type {HTMLAnchorElement | null} */ (document.querySelector(".tabs [aria-current]"));
  if (tree) tree.search = sessionStorage.getItem(`tree ${part.dataset.checkpoint}`) ?? "";
} catch {
  /* storage may be forbidden: then the tab shows the tree from its root */
}
