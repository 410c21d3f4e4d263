// @ts-check
/**
 * The tree of a checkpoint: only the rows in view exist, children are fetched as they come into view, repeated blocks
 * are folded. The model knows of every open node how many rows are below it, so that any row is found by its number.
 */
import { api, base, bytesText, copiers, find, make, numberText, reason, recalled, remember } from "./dom.js";

/** @typedef {{ node: string, key: string, path: string, kind: string, children: number, leaves: number, nbytes: number, share: number, leaf: number | null, text: string }} Row */
/** @typedef {{ start: number, stop: number, blocks: number, title: string, names: string[], skip: number, leaves: number, nbytes: number }} Fold */
/** @typedef {{ count: number, child: (at: number) => Omit<Item, "parent" | "at" | "level" | "open" | "total" | "kids" | "made" | "opened"> }} Kids */
/**
 * A row. `row` gives what is known of it, null while that is fetched; `expand` makes its children.
 * @typedef {{ parent: Item | null, at: number, level: number, row: () => Row | null, name: (row: Row) => string, times: number, real: boolean,
 *   expand: () => Promise<Kids>, open: boolean, total: number, kids: Kids | null, made: Map<number, Item>, opened: number[] }} Item
 */

const PAGE = 100;
const TALLEST = 12_000_000; // Chromium clamps elements at 33.5 million pixels: beyond this the scroll is scaled
const holder = find("#tree");
const state = find("#tree-state");
const input = /** @type {HTMLInputElement} */ (find("#q"));
const dtype = /** @type {HTMLSelectElement} */ (find("#dtype"));
const larger = /** @type {HTMLSelectElement} */ (find("#larger"));
const picked = find("#picked");
const checkpoint = holder.dataset.checkpoint ?? "";
const top = holder.dataset.node ?? "";
const narrow = window.matchMedia("(max-width: 640px)");
const SVG = "http://www.w3.org/2000/svg";

const sizer = make("div", { role: "none", class: "sizer" });
/** @type {Item} */
let root;
/** @type {Item | null} */
let current = null;
/** @type {Map<string, Row[] | null>} */
const pages = new Map();

const rowHeight = () => (narrow.matches ? 50 : 32);

// the model ------------------------------------------------------------------------------------------------------------

/** @param {Item | null} parent @param {number} at @param {ReturnType<Kids["child"]>} given @returns {Item} */
const itemOf = (parent, at, given) => ({ ...given, parent, at, level: parent ? parent.level + 1 : 0, open: false, total: 0, kids: null, made: new Map(), opened: [] });

/** A row of the server's, by its place among the children of a node. @param {string} node @param {number} position @returns {Row | null} */
function fetched(node, position) {
  const start = Math.floor(position / PAGE) * PAGE, key = `${node}:${start}`;
  const found = pages.get(key);
  if (found === undefined) {
    pages.set(key, null);
    api(`checkpoints/${checkpoint}/tree`, { node, start }).then((page) => { pages.set(key, page.rows); render(); })
      .catch((error) => { pages.delete(key); failed(error); });
  }
  return found?.[position - start] ?? null;
}

/** Children `from:to` of a node, without folds. @param {string} node @param {number} from @param {number} to @param {(key: string) => string} shorten @returns {Kids} */
const range = (node, from, to, shorten) => ({ count: to - from, child: (at) => nodeItem(node, from + at, shorten) });

/** @param {string} node @param {number} position @param {(key: string) => string} [shorten] @returns {ReturnType<Kids["child"]>} */
function nodeItem(node, position, shorten = (key) => key) {
  const row = () => fetched(node, position);
  return { row, name: (found) => shorten(found.key), times: 0, real: true, expand: async () => childrenOf(row()?.node ?? "") };
}

/** The children of a node, repeated blocks folded. @param {string} node @returns {Promise<Kids>} */
async function childrenOf(node) {
  const found = /** @type {{ children: number, dtypes: string[], folds: Fold[] }} */ (await api(`checkpoints/${checkpoint}/folds`, { node }));
  offer(found.dtypes);
  if (!found.children) return { count: 1, child: () => nodeItem(node, 0) }; // the whole tree is one leaf
  const hidden = found.folds.reduce((sum, fold) => sum + fold.stop - fold.start - 1, 0);
  return {
    count: found.children - hidden,
    child: (at) => {
      let position = at;
      for (const fold of found.folds) {
        if (position < fold.start) break;
        if (position === fold.start) return foldItem(node, fold);
        position += fold.stop - fold.start - 1;
      }
      return nodeItem(node, position);
    },
  };
}

/** @param {string} node @param {Fold} fold @returns {ReturnType<Kids["child"]>} */
function foldItem(node, fold) {
  const length = (fold.stop - fold.start) / fold.blocks;
  /** @param {string} key @param {number} blocks @param {number} children @returns {Row} */
  const summary = (key, blocks, children) => ({ node: "", key, path: "", kind: "fold", children, leaves: (fold.leaves / fold.blocks) * blocks, nbytes: (fold.nbytes / fold.blocks) * blocks, share: 0, leaf: null, text: blocks > 1 ? `${blocks} equal blocks` : "block" });
  /** @param {number} block @returns {ReturnType<Kids["child"]>} */
  const blockItem = (block) => {
    const from = fold.start + block * length, name = fold.names[block];
    if (length === 1 && !fold.skip) return nodeItem(node, from);
    return { row: () => summary(name, 1, length), name: () => name, times: 0, real: false, expand: async () => range(node, from, from + length, (key) => key.slice(name.length + fold.skip)) };
  };
  return { row: () => summary(fold.title, fold.blocks, fold.blocks), name: () => fold.title, times: fold.blocks, real: false, expand: async () => ({ count: fold.blocks, child: blockItem }) };
}

/** @param {Item} item @param {number} at */
function childAt(item, at) {
  let child = item.made.get(at);
  if (!child && item.kids) {
    child = itemOf(item, at, item.kids.child(at));
    item.made.set(at, child);
  }
  return /** @type {Item} */ (child);
}

/** The row of a number among those below an item. @param {Item} item @param {number} number @returns {Item} */
function below(item, number) {
  let extra = 0;
  for (const at of item.opened) {
    const child = childAt(item, at);
    if (number <= at + extra) break;
    if (number <= at + extra + child.total) return below(child, number - at - extra - 1);
    extra += child.total;
  }
  return childAt(item, number - extra);
}

/** The number of an item's row. @param {Item} item @returns {number} */
function numberOf(item) {
  if (!item.parent) return -1;
  const { parent, at } = item;
  return numberOf(parent) + 1 + at + parent.opened.filter((other) => other < at).reduce((sum, other) => sum + childAt(parent, other).total, 0);
}

/** @param {Item} item @param {number} more */
function grow(item, more) {
  for (let at = /** @type {Item | null} */ (item); at; at = at.parent) { at.total += more; if (at !== item && !at.open) break; }
}

/** @param {Item} item */
const canOpen = (item) => { const row = item.row(); return row !== null && row.leaf === null && row.children > 0; };

/** @param {Item} item @param {boolean} open */
async function toggle(item, open = !item.open) {
  if (!canOpen(item) || item.open === open || !item.parent) return;
  item.open = open;
  item.parent.opened = item.parent.opened.filter((at) => at !== item.at);
  if (!open) {
    const before = item.total;
    grow(item, -before);
  } else {
    if (!item.kids) { item.kids = await item.expand().catch((error) => { failed(error); return { count: 0, child: () => nodeItem("", 0) }; }); }
    item.parent.opened = [...item.parent.opened, item.at].sort((a, b) => a - b);
    grow(item, item.kids.count + item.opened.reduce((sum, at) => sum + childAt(item, at).total, 0));
  }
  keep();
  render();
}

// what is seen -----------------------------------------------------------------------------------------------------------

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

let whole = 0;

/** The rows that are drawn. @type {Map<Item, { line: HTMLElement, content: string }>} */
let lines = new Map();

/** @param {Item} item @param {number} number */
function draw(item, number) {
  const row = item.row();
  const leaf = row !== null && row.leaf !== null;
  const name = row === null ? "…" : item.name(row) || "(root)";
  const key = make("span", { class: "key mono" }, leaf || !row ? make("span", { class: "twist" }) : twist(),
    row && leaf ? make("a", { href: href(row), tabindex: "-1", title: name }, name) : make("span", { title: name }, name),
    item.times ? make("span", { class: "times" }, `×${item.times}`) : null);
  const what = row === null ? "" : leaf ? row.text : `${row.text} · ${numberText(row.leaves)} ${row.leaves === 1 ? "leaf" : "leaves"}`;
  if (row && !row.share && whole) row.share = row.nbytes / whole;
  const line = make("div", { role: "treeitem", class: "row", id: `row-${number}`, "aria-level": item.level, "aria-setsize": item.parent?.kids?.count ?? 1, "aria-posinset": item.at + 1,
    "aria-expanded": canOpen(item) ? String(item.open) : null },
    key, make("span", { class: "what", title: what }, what), row?.nbytes ? bar(row.share) : make("span"), make("span", { class: "size" }, row?.nbytes ? bytesText(row.nbytes) : ""));
  line.style.height = `${rowHeight()}px`;
  line.style.paddingLeft = `${8 + (item.level - 1) * (narrow.matches ? 12 : 20)}px`;
  line.addEventListener("click", (event) => {
    if (event.target instanceof HTMLAnchorElement) return;
    pick(item, false);
    toggle(item);
  });
  return line;
}

function render() {
  if (!root) return;
  const height = rowHeight(), all = root.total * height;
  const tall = Math.min(all, TALLEST);
  sizer.style.height = `${tall}px`;
  const view = holder.clientHeight;
  const scale = all > tall ? (all - view) / (tall - view) : 1;
  const from = holder.scrollTop * scale, first = Math.max(0, Math.floor(from / height) - 4);
  const last = Math.min(root.total, Math.ceil((from + view) / height) + 4);
  // rows that stay the same stay in place: one that is replaced under the pointer would never get its click
  const before = lines;
  lines = new Map();
  for (let number = first; number < last; number += 1) {
    const item = below(root, number), content = `${number} ${item.row() !== null} ${item.open} ${item.parent?.kids?.count} ${height}`;
    const kept = before.get(item);
    const line = kept?.content === content ? kept.line : draw(item, number);
    line.setAttribute("aria-selected", String(item === current));
    line.style.top = `${holder.scrollTop + number * height - from}px`;
    lines.set(item, { line, content });
  }
  const stay = new Set([...lines.values()].map(({ line }) => line));
  for (const line of [...sizer.children]) if (!stay.has(/** @type {HTMLElement} */ (line))) line.remove();
  let next = sizer.firstElementChild;
  for (const line of stay) {
    if (line === next) next = next.nextElementSibling;
    else sizer.insertBefore(line, next);
  }
  const at = current ? numberOf(current) : -1;
  if (current && at >= first && at < last) holder.setAttribute("aria-activedescendant", `row-${at}`);
  else holder.removeAttribute("aria-activedescendant");
}

/** @param {Item} item @param {boolean} [scroll] */
function pick(item, scroll = true) {
  current = item;
  if (scroll) {
    const height = rowHeight(), all = root.total * height, tall = Math.min(all, TALLEST), view = holder.clientHeight;
    const scale = all > tall ? (all - view) / (tall - view) : 1;
    const from = holder.scrollTop * scale, place = numberOf(item) * height;
    if (place < from) holder.scrollTop = place / scale;
    else if (place + height > from + view) holder.scrollTop = (place + height - view) / scale;
  }
  const row = item.row();
  picked.hidden = !row || !item.real;
  if (row && item.real) find("#picked-path").replaceChildren(make("span", {}, row.path || "(the whole tree)"));
  render();
}

/** @param {unknown} error */
function failed(error) {
  if (!(error instanceof DOMException && error.name === "AbortError")) state.textContent = `This did not work: ${reason(error)}`;
}

/** @param {KeyboardEvent} event */
function keys(event) {
  if (event.altKey || event.ctrlKey || event.metaKey || !root.total) return;
  const at = current ? numberOf(current) : -1, full = Math.max(1, Math.floor(holder.clientHeight / rowHeight()) - 1);
  const steps = { ArrowDown: at + 1, j: at + 1, ArrowUp: at - 1, k: at - 1, PageDown: at + full, PageUp: at - full, Home: 0, End: root.total - 1 };
  if (event.key in steps) {
    const number = steps[/** @type {keyof typeof steps} */ (event.key)];
    pick(below(root, Math.max(0, Math.min(root.total - 1, number))));
  } else if (current && event.key === "ArrowRight") {
    if (!current.open) toggle(current, true);
    else if (current.total) pick(childAt(current, 0));
  } else if (current && event.key === "ArrowLeft") {
    if (current.open) toggle(current, false);
    else if (current.parent?.parent) pick(current.parent);
  } else if (current && (event.key === "Enter" || event.key === " ")) {
    const row = current.row();
    if (row && row.leaf !== null) location.assign(href(row));
    else toggle(current);
  } else return;
  event.preventDefault();
}

// what is shown: the tree, or what a search finds ------------------------------------------------------------------------

/** @param {Kids} kids */
function put(kids) {
  root = itemOf(null, 0, { row: () => null, name: () => "", times: 0, real: false, expand: async () => kids });
  root.kids = kids;
  root.open = true;
  root.total = kids.count;
  current = null;
  picked.hidden = true;
  if (!holder.contains(sizer)) {
    holder.replaceChildren(sizer);
    for (const [name, value] of Object.entries({ role: "tree", tabindex: "0", "aria-labelledby": "tree-title", class: "tree" })) holder.setAttribute(name, value);
  }
  holder.scrollTop = 0;
  render();
}

/** Puts what is open into the address: of each open row, the places that lead to it. */
function keep() {
  /** @type {string[]} */
  const open = [];
  /** @param {Item} item @param {string} prefix */
  const walk = (item, prefix) => { for (const at of item.opened) { open.push(`${prefix}${at}`); walk(childAt(item, at), `${prefix}${at}-`); } };
  walk(root, "");
  remember({ open: open.length <= 40 && !asked() ? open.join("_") : null });
}

/** Opens what the address says. @param {string} text */
async function restore(text) {
  if (!/^[0-9_-]{1,2000}$/.test(text)) return;
  for (const steps of text.split("_").slice(0, 40)) {
    let item = root;
    for (const step of steps.split("-")) {
      if (!item.kids || Number(step) >= item.kids.count) return;
      item = childAt(item, Number(step));
    }
    await ready(item);
    await toggle(item, true);
  }
}

/** Waits until a row is known. @param {Item} item */
async function ready(item) {
  for (let tries = 0; tries < 200 && !item.row(); tries += 1) await new Promise((done) => setTimeout(done, 15));
}

const asked = () => input.value.trim() || dtype.value || larger.value;

async function browse() {
  state.textContent = "";
  try { put(await childrenOf(top)); } catch (error) { failed(error); return; }
  if (top) state.replaceChildren(make("a", { href: "?" }, "Whole tree"));
}

let running = new AbortController();

async function search() {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  const query = { q: input.value.trim(), dtype: dtype.value, larger: larger.value };
  remember({ ...query, start: null, open: asked() ? null : recalled("open") });
  if (!asked()) return browse();
  /** @type {Row[]} */
  const rows = [];
  let next = /** @type {number | null} */ (0), busy = false;
  /** @type {Kids} */
  const kids = { count: 0, child: (at) => ({
    // the row behind the last one stands for those not fetched yet
    row: () => { if (at >= rows.length) more(); return rows[at] ?? null; }, name: (row) => row.path, times: 0, real: true, expand: async () => kids,
  }) };
  async function more() {
    if (busy || next === null) return;
    busy = true;
    try {
      const found = await api(`checkpoints/${checkpoint}/leaves`, { ...query, start: next }, signal);
      rows.push(...found.rows);
      next = found.next;
    } catch (error) { next = null; failed(error); }
    busy = false;
    if (signal.aborted) return;
    const before = kids.count;
    kids.count = rows.length + (next === null ? 0 : 1);
    const shown = numberText(rows.length);
    state.textContent = rows.length ? `${next === null ? shown : `first ${shown}`} ${rows.length === 1 ? "leaf" : "leaves"}` : next === null ? "No leaf fits all of this." : "Searching …";
    if (before === 0 || root.kids !== kids) put(kids);
    else { root.total += kids.count - before; root.made.delete(before - 1); render(); }
    if (!rows.length && next !== null) more();
  }
  await more();
}

/** The dtypes to choose from. @param {string[]} names */
function offer(names) {
  if (dtype.options.length > 1) return;
  for (const name of names) dtype.append(make("option", { value: name }, name));
  dtype.value = names.includes(recalled("dtype") ?? "") ? recalled("dtype") ?? "" : "";
}

let timer = 0;
input.addEventListener("input", () => { clearTimeout(timer); timer = window.setTimeout(search, 120); });
for (const select of [dtype, larger]) select.addEventListener("change", () => { search(); });
find("#search").addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(timer); search(); });
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
  if (event.key === "/" && !typing) { event.preventDefault(); input.focus(); input.select(); }
  if (event.key === "Escape" && event.target === input) { input.value = ""; search(); }
});
holder.addEventListener("keydown", keys);
holder.addEventListener("focus", () => { if (!current && root?.total) pick(below(root, 0), false); });
holder.addEventListener("scroll", () => requestAnimationFrame(render));
new ResizeObserver(render).observe(holder);
copiers(picked, checkpoint, () => current?.row()?.path ?? "");

whole = Number(holder.dataset.nbytes) || 0;
larger.value = [...larger.options].some((option) => option.value === recalled("larger")) ? recalled("larger") ?? "" : "";
await browse();
if (asked()) await search();
else if (recalled("open")) await restore(recalled("open") ?? "");
