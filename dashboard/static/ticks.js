// @ts-check
/**
 * Rows that are ticked to be compared. They are in the address of the page, and in its links to itself, so that they
 * stay when it is filtered, paged or shown again.
 */
import { find, remember } from "./dom.js";

const form = find("[data-ticks]");
const name = form.dataset.ticks ?? "";
const ticked = () => new URLSearchParams(location.search).getAll(name);

/** Writes the ticks into the links of the page to itself, and tells how many there are. */
function show() {
  const values = ticked();
  find("[data-count]").textContent = values.length ? String(values.length) : "";
  for (const link of document.querySelectorAll('main a[href^="?"]')) {
    const query = new URLSearchParams(link.getAttribute("href") ?? "");
    query.delete(name);
    for (const value of values) query.append(name, value);
    link.setAttribute("href", `?${query}`);
  }
}

document.addEventListener("change", ({ target }) => {
  if (!(target instanceof HTMLInputElement) || target.type !== "checkbox" || target.name !== name) return;
  const others = ticked().filter((value) => value !== target.value);
  remember({ [name]: target.checked ? [...others, target.value] : others });
  show();
});
show();
