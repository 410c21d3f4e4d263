// @ts-check
/** The tree of a checkpoint: children fetched when a node is opened, a search over all paths, and the keys of a tree. */
import { api, base, bytesText, find, make, numberText } from "./dom.js";

/** @typedef {{ node: string, key: string, path: string, kind: string, children: number, leaves: number, nbytes: number, share: number, leaf: number | null, text: string }} Row */

const holder = find("#tree");
const state = find("#tree-state");
const input = /** @type {HTMLInputElement} */ (find("#q"));
const checkpoint = holder.dataset.checkpoint ?? "";
const SVG = "http://www.w3.org/2000/svg";

/** @param {string} name @param {Record<string, string>} attributes @param {SVGElement[]} children */
function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const twist = () => svg("svg", { viewBox: "0 0 14 14", class: "twist", "aria-hidden": "true" },
  svg("path", { d: "M5 3l4 4-4 4", fill: "none", stroke: "currentColor", "stroke-width": "1.6", "stroke-linecap": "round" }));

/** @param {number} share */
const bar = (share) => svg("svg", { viewBox: "0 0 100 1", preserveAspectRatio: "none", class: "bar", "aria-hidden": "true" },
  svg("rect", { width: String(share * 100), height: "1" }));

/** @param {Row} row */
const href = (row) => `${base}checkpoints/${encodeURIComponent(checkpoint)}/leaves/${row.leaf}`;

/** @param {Row} row @param {number} level @param {boolean} whole */
function item(row, level, whole) {
  const leaf = row.leaf !== null;
  const name = (whole ? row.path : row.key) || "(root)";
  const key = make("span", { class: "key mono" }, leaf ? make("span", { class: "twist" }) : twist(),
    leaf ? make("a", { href: href(row), tabindex: "-1", title: name }, name) : make("span", { title: name }, name));
  const what = leaf ? row.text : `${row.text} · ${numberText(row.leaves)} ${row.leaves === 1 ? "leaf" : "leaves"}`;
  const line = make("div", { class: "row" }, key, make("span", { class: "what", title: what }, what),
    row.nbytes ? bar(row.share) : make("span"), make("span", { class: "size" }, row.nbytes ? bytesText(row.nbytes) : ""));
  const made = make("li", { role: "treeitem", tabindex: "-1", "aria-level": level, "aria-expanded": leaf || !row.children ? null : "false" }, line);
  line.addEventListener("click", (event) => {
    if (event.target instanceof HTMLAnchorElement) return;
    focus(made);
    leaf ? location.assign(href(row)) : toggle(made, row, level);
  });
  made.addEventListener("keydown", (event) => { if (event.target === made) keys(event, made, row, level); });
  return made;
}

/** @param {HTMLElement} list @param {Row[]} rows @param {number} level @param {boolean} whole */
function append(list, rows, level, whole) {
  for (const row of rows) list.append(item(row, level, whole));
}

/**
 * Adds a page of rows, and a button for the next one.
 * @param {HTMLElement} list @param {number} level @param {(start: number) => Promise<{ rows: Row[], next: number | null }>} fetchPage
 * @param {number} start @param {boolean} whole
 */
async function page(list, level, fetchPage, start, whole) {
  const found = await fetchPage(start);
  append(list, found.rows, level, whole);
  const next = found.next;
  if (next === null) return found;
  const button = make("button", { type: "button", class: "link" }, "Show 100 more");
  const more = make("li", { role: "none", class: "more" }, button);
  list.append(more);
  button.addEventListener("click", async () => {
    const last = more.previousElementSibling;
    more.remove();
    await guarded(page(list, level, fetchPage, next, whole));
    if (last?.nextElementSibling instanceof HTMLElement) focus(last.nextElementSibling);
  });
  return found;
}

/** @param {HTMLElement} made @param {Row} row @param {number} level @param {boolean} [open] */
async function toggle(made, row, level, open = made.getAttribute("aria-expanded") === "false") {
  if (!made.hasAttribute("aria-expanded")) return;
  made.setAttribute("aria-expanded", String(open));
  const kept = made.querySelector(":scope > ul");
  if (kept) { kept.toggleAttribute("hidden", !open); return; }
  const list = make("ul", { role: "group" });
  made.append(list);
  await guarded(page(list, level + 1, (start) => api(`checkpoints/${checkpoint}/tree`, { node: row.node, start }), 0, false));
}

/** @param {HTMLElement} made */
function focus(made) {
  for (const other of holder.querySelectorAll("[role=treeitem][tabindex='0']")) other.setAttribute("tabindex", "-1");
  made.setAttribute("tabindex", "0");
  made.focus();
}

const shown = () => /** @type {HTMLElement[]} */ ([...holder.querySelectorAll("[role=treeitem]")]).filter((made) => !made.closest("ul[hidden]"));

/** @param {KeyboardEvent} event @param {HTMLElement} made @param {Row} row @param {number} level */
function keys(event, made, row, level) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const all = shown();
  const at = all.indexOf(made);
  const expanded = made.getAttribute("aria-expanded");
  /** @type {HTMLElement | null | undefined} */
  let target = null;
  switch (event.key) {
    case "ArrowDown": case "j": target = all[at + 1]; break;
    case "ArrowUp": case "k": target = all[at - 1]; break;
    case "Home": target = all[0]; break;
    case "End": target = all[all.length - 1]; break;
    case "ArrowRight":
      if (expanded === "false") toggle(made, row, level, true);
      else target = made.querySelector(":scope > ul > [role=treeitem]");
      break;
    case "ArrowLeft":
      if (expanded === "true") toggle(made, row, level, false);
      else target = made.parentElement?.closest("[role=treeitem]");
      break;
    case "Enter": case " ":
      if (row.leaf !== null) location.assign(href(row));
      else toggle(made, row, level);
      break;
    default: return;
  }
  event.preventDefault();
  if (target) focus(target);
}

/** @template T @param {Promise<T>} work @returns {Promise<T | null>} */
async function guarded(work) {
  try {
    return await work;
  } catch (error) {
    if (!(error instanceof DOMException && error.name === "AbortError")) state.textContent = `This did not work: ${error instanceof Error ? error.message : error}`;
    return null;
  }
}

/** @param {HTMLElement} list */
function show(list) {
  holder.replaceChildren(list);
  list.querySelector("[role=treeitem]")?.setAttribute("tabindex", "0");
}

const root = () => make("ul", { role: "tree", class: "tree", "aria-labelledby": "tree-title" });

async function browse() {
  const list = root();
  const node = holder.dataset.node ?? "";
  const found = await guarded(page(list, 1, (start) => api(`checkpoints/${checkpoint}/tree`, { node, start }), 0, false));
  if (!found) return;
  state.textContent = "";
  show(list);
  if (node) state.replaceChildren(make("a", { href: "?" }, "Whole tree"));
}

let running = new AbortController();

/** @param {string} query */
async function search(query) {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  const address = new URL(location.href);
  query ? address.searchParams.set("q", query) : address.searchParams.delete("q");
  address.searchParams.delete("start");
  history.replaceState(null, "", address);
  if (!query) return browse();
  const list = root();
  const found = await guarded(page(list, 1, (start) => api(`checkpoints/${checkpoint}/search`, { q: query, start }, signal), 0, true));
  if (!found || signal.aborted) return;
  const count = list.querySelectorAll("[role=treeitem]").length;
  state.textContent = count ? `${found.next === null ? count : `first ${count}`} ${count === 1 ? "leaf" : "leaves"}` : "No path holds all of these words.";
  show(list);
}

let timer = 0;
input.addEventListener("input", () => { clearTimeout(timer); timer = window.setTimeout(() => search(input.value.trim()), 120); });
find("#search").addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(timer); search(input.value.trim()); });
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement;
  if (event.key === "/" && !typing) { event.preventDefault(); input.focus(); input.select(); }
  if (event.key === "Escape" && typing) { input.value = ""; search(""); }
});
input.value.trim() ? search(input.value.trim()) : browse();
