// @ts-check
/** The tree of a checkpoint, or what a search finds in it: only the rows in view exist as elements. */
import { api, base, bytesText, copiers, countText, find, make, numberText } from "./dom.js";
import { reason, recalled, remember } from "./dom.js";
import { canOpen, childAt, itemBelow, itemOf, nodesOf, numberOf, setOpen } from "./tree_items.js";

/** @typedef {import("./tree_items.js").Item} Item */
/** @typedef {import("./tree_items.js").Row} Row */
/** @typedef {import("./tree_items.js").Children} Children */

const TALLEST = 12_000_000; // Chromium clamps elements at 33.5 million pixels: beyond this the scroll is scaled
const holder = find("#tree");
const state = find("#tree-state");
const input = /** @type {HTMLInputElement} */ (find("#q"));
const dtype = /** @type {HTMLSelectElement} */ (find("#dtype"));
const larger = /** @type {HTMLSelectElement} */ (find("#larger"));
const picked = find("#picked");
const found = find("#found");
const block = /** @type {HTMLInputElement} */ (find("#picked-block"));
const checkpoint = holder.dataset.checkpoint ?? "";
const top = holder.dataset.node ?? "";
const narrow = window.matchMedia("(max-width: 640px)");

const sizer = make("div", { role: "none", class: "sizer" });
/** @type {Item} */
let root;
/** @type {Item | null} */
let current = null;
const rowHeight = () => (narrow.matches ? 50 : 32);

/** What did not work, for a person. @param {unknown} error */
function failed(error) {
  if (error instanceof DOMException && error.name === "AbortError") return;
  state.textContent = `This did not work: ${reason(error)}`;
}

const childrenOf = nodesOf(checkpoint, () => render(), failed, offer);

/** @param {Item} item @param {boolean} open */
async function toggle(item, open = !item.open) {
  if (!canOpen(item) || item.open === open || !item.parent) return;
  await setOpen(item, open, failed);
  rememberOpen();
  render();
}

// the rows in view ----------------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

/** @param {string} name @param {Record<string, string>} attributes @param {SVGElement[]} children */
function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const twist = () =>
  svg(
    "svg",
    { viewBox: "0 0 14 14", class: "twist", "aria-hidden": "true" },
    svg("path", {
      d: "M5 3l4 4-4 4",
      fill: "none",
      stroke: "currentColor",
      "stroke-width": "1.6",
      "stroke-linecap": "round",
    }),
  );

/** @param {number} share */
const bar = (share) =>
  svg(
    "svg",
    { viewBox: "0 0 100 1", preserveAspectRatio: "none", class: "bar", "aria-hidden": "true" },
    svg("rect", { width: String(share * 100), height: "1" }),
  );

/** What a row is, in words. @param {Row} row */
function describe({ leaf, leaves, text }) {
  return leaf !== null ? text : `${text} · ${countText(leaves, "leaf", "leaves")}`;
}

/**
 * @param {Item} item @param {number} number of the row
 * @param {{ hrefOf: (row: Row) => string, nbytes: number }} checkpoint its links and bytes
 */
function rowElement(item, number, { hrefOf, nbytes }) {
  const row = item.row();
  const leaf = row !== null && row.leaf !== null;
  const name = row === null ? "…" : item.name(row) || "(root)";
  const key = make(
    "span",
    { class: "key mono" },
    leaf || !row ? make("span", { class: "twist" }) : twist(),
    row && leaf
      ? make("a", { href: hrefOf(row), tabindex: "-1", title: name }, name)
      : make("span", { title: name }, name),
    item.times ? make("span", { class: "times" }, `×${item.times}`) : null,
    row?.damaged ? make("span", { class: "harm" }, leaf ? "damaged" : `${numberText(row.damaged)} damaged`) : null,
  );
  const what = row ? describe(row) : "";
  if (row && !row.share && nbytes) row.share = row.nbytes / nbytes;
  return make(
    "div",
    {
      role: "treeitem",
      class: "row",
      id: `row-${number}`,
      "aria-level": item.level,
      "aria-setsize": item.parent?.children?.count ?? 1,
      "aria-posinset": item.at + 1,
      "aria-expanded": canOpen(item) ? String(item.open) : null,
    },
    key,
    make("span", { class: "what", title: what }, what),
    row?.nbytes ? bar(row.share) : make("span"),
    make("span", { class: "size" }, row?.nbytes ? bytesText(row.nbytes) : ""),
  );
}

const nbytes = Number(holder.dataset.nbytes) || 0;

/** @param {Row} row */
const hrefOf = (row) => `${base}checkpoints/${encodeURIComponent(checkpoint)}/leaves/${row.leaf}`;

/** The rows that are drawn. @type {Map<Item, { line: HTMLElement, content: string }>} */
let lines = new Map();

/** @param {Item} item @param {number} number */
function draw(item, number) {
  const line = rowElement(item, number, { hrefOf, nbytes });
  line.style.height = `${rowHeight()}px`;
  line.style.paddingLeft = `${8 + (item.level - 1) * (narrow.matches ? 12 : 20)}px`;
  line.addEventListener("click", (event) => {
    if (event.target instanceof HTMLAnchorElement) return;
    pick(item, false);
    toggle(item);
  });
  return line;
}

/** Heights of a row, of the scrolled element and of the view; pixels per pixel of scroll; and the top in view. */
function viewport() {
  const height = rowHeight();
  const all = root.total * height;
  const tall = Math.min(all, TALLEST);
  const view = holder.clientHeight;
  const scale = all > tall ? (all - view) / (tall - view) : 1;
  return { height, tall, view, scale, from: holder.scrollTop * scale };
}

function render() {
  if (!root) return;
  const { height, tall, view, from } = viewport();
  sizer.style.height = `${tall}px`;
  const first = Math.max(0, Math.floor(from / height) - 4);
  const last = Math.min(root.total, Math.ceil((from + view) / height) + 4);
  // rows that do not change stay in place: a row that is replaced under the pointer would lose its click
  const before = lines;
  lines = new Map();
  for (let number = first; number < last; number += 1) {
    const item = itemBelow(root, number);
    const content = `${number} ${item.row() !== null} ${item.open} ${item.parent?.children?.count} ${height}`;
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
  const shown = current && at >= first && at < last;
  for (const element of [holder, input]) {
    if (shown) element.setAttribute("aria-activedescendant", `row-${at}`);
    else element.removeAttribute("aria-activedescendant");
  }
}

/** Offers to choose one of several blocks. @param {string[]} names */
function showBlocks(names) {
  find("#picked-path").replaceChildren(make("span", {}, names.length > 1 ? `${names[0]} …` : names[0]));
  block.min = /[0-9]+$/.exec(names[0])?.[0] ?? "0";
  block.max = String(Number(block.min) + names.length - 1);
  block.value = block.min;
}

/** Requests the code that loads the picked row, or the chosen block of several. */
function code() {
  const { node, start, length, names } = current?.blocks ?? { node: "", start: 0, length: 0, names: [] };
  const number = Math.max(0, Math.min(names.length - 1, Number(block.value) - Number(block.min)));
  const children = { node, start: start + number * length, stop: start + (number + 1) * length };
  const query = current?.blocks ? children : { path: current?.row()?.path ?? "" };
  return api(`checkpoints/${checkpoint}/snippet`, query);
}

/** @param {Item} item @param {boolean} [scroll] */
function pick(item, scroll = true) {
  current = item;
  if (scroll) {
    const { height, view, scale, from } = viewport();
    const place = numberOf(item) * height;
    if (place < from) holder.scrollTop = place / scale;
    else if (place + height > from + view) holder.scrollTop = (place + height - view) / scale;
  }
  const row = item.row();
  picked.hidden = !row || !(item.real || item.blocks);
  if (row && item.real) find("#picked-path").replaceChildren(make("span", {}, row.path || "(the whole tree)"));
  find("[data-copy=path]").hidden = !item.real;
  find("label[for=picked-block]").hidden = (item.blocks?.names.length ?? 0) < 2;
  if (item.blocks) showBlocks(item.blocks.names);
  render();
}

/** Keys of the search: arrows move in what was found, Enter opens it. @param {KeyboardEvent} event */
function searchKeys(event) {
  if (["ArrowDown", "ArrowUp", "PageDown", "PageUp"].includes(event.key) || (event.key === "Enter" && current))
    keys(event);
}

/** @param {KeyboardEvent} event */
function keys(event) {
  if (event.altKey || event.ctrlKey || event.metaKey || !root?.total) return;
  const at = current ? numberOf(current) : -1;
  const full = Math.max(1, Math.floor(holder.clientHeight / rowHeight()) - 1);
  const steps = {
    ArrowDown: at + 1,
    j: at + 1,
    ArrowUp: at - 1,
    k: at - 1,
    PageDown: at + full,
    PageUp: at - full,
    Home: 0,
    End: root.total - 1,
  };
  if (event.key in steps) {
    const number = steps[/** @type {keyof typeof steps} */ (event.key)];
    pick(itemBelow(root, Math.max(0, Math.min(root.total - 1, number))));
  } else if (current && event.key === "ArrowRight") {
    if (!current.open) toggle(current, true);
    else if (current.total) pick(childAt(current, 0));
  } else if (current && event.key === "ArrowLeft") {
    if (current.open) toggle(current, false);
    else if (current.parent?.parent) pick(current.parent);
  } else if (current && (event.key === "Enter" || event.key === " ")) {
    const row = current.row();
    if (row && row.leaf !== null) location.assign(hrefOf(row));
    else toggle(current);
  } else return;
  event.preventDefault();
}

// the whole tree, or the leaves that a search finds -------------------------------------------------------------------

/** @param {Children} children */
function showRows(children) {
  root = itemOf(null, 0, { row: () => null, name: () => "", times: 0, real: false, expand: async () => children });
  root.children = children;
  root.open = true;
  root.total = children.count;
  current = null;
  picked.hidden = true;
  if (!holder.contains(sizer)) {
    holder.replaceChildren(sizer);
    for (const [name, value] of Object.entries({
      role: "tree",
      tabindex: "0",
      "aria-labelledby": "tree-title",
      class: "tree",
    }))
      holder.setAttribute(name, value);
  }
  holder.scrollTop = 0;
  render();
}

/** Writes the open rows into the address, each as the positions that lead to it. */
function rememberOpen() {
  /** @type {string[]} */
  const open = [];
  /** @param {Item} item @param {string} prefix */
  const walk = (item, prefix) => {
    for (const at of item.opened) {
      open.push(`${prefix}${at}`);
      walk(childAt(item, at), `${prefix}${at}-`);
    }
  };
  walk(root, "");
  remember({ open: open.length <= 40 && !filtered() ? open.join("_") : null });
}

/** Opens the rows of the address. @param {string} text */
async function restore(text) {
  if (!/^[0-9_-]{1,2000}$/.test(text)) return;
  for (const steps of text.split("_").slice(0, 40)) {
    let item = root;
    for (const step of steps.split("-")) {
      if (!item.children || Number(step) >= item.children.count) return;
      item = childAt(item, Number(step));
    }
    await ready(item);
    await toggle(item, true);
  }
}

/** Waits until a row is fetched. @param {Item} item */
async function ready(item) {
  for (let tries = 0; tries < 200 && !item.row(); tries += 1) await new Promise((done) => setTimeout(done, 15));
}

/** What the search asks for. */
const asked = () => ({ q: input.value.trim(), dtype: dtype.value, larger: larger.value });
const filtered = () => Object.values(asked()).some(Boolean);

async function browse() {
  state.textContent = "";
  found.hidden = true;
  try {
    showRows(await childrenOf(top));
  } catch (error) {
    failed(error);
    return;
  }
  if (top) state.replaceChildren(make("a", { href: "?" }, "Whole tree"));
}

let running = new AbortController();

async function search() {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  const query = asked();
  remember({ ...query, start: null, open: filtered() ? null : recalled("open") });
  if (!filtered()) return browse();
  /** @type {Row[]} */
  const rows = [];
  let next = /** @type {number | null} */ (0);
  let busy = false;
  /** @type {Children} */
  const children = {
    count: 0,
    child: (at) => ({
      // the row after the last one stands for the leaves that are not fetched yet
      row: () => {
        if (at >= rows.length) more();
        return rows[at] ?? null;
      },
      name: (row) => row.path,
      times: 0,
      real: true,
      expand: async () => children,
    }),
  };
  async function more() {
    if (busy || next === null) return;
    busy = true;
    try {
      const page = await api(`checkpoints/${checkpoint}/leaves`, { ...query, start: next }, signal);
      rows.push(...page.rows);
      next = page.next;
    } catch (error) {
      next = null;
      failed(error);
    }
    busy = false;
    if (signal.aborted) return;
    const before = children.count;
    children.count = rows.length + (next === null ? 0 : 1);
    found.hidden = !rows.length;
    const shown = numberText(rows.length);
    state.textContent = rows.length
      ? `${next === null ? shown : `first ${shown}`} ${rows.length === 1 ? "leaf" : "leaves"}`
      : next === null
        ? "No leaf fits all of this."
        : "Searching …";
    if (before === 0 || root.children !== children) showRows(children);
    else {
      root.total += children.count - before;
      // This item stood for the leaves that were not fetched; the next one of its row is a leaf.
      root.created.delete(before - 1);
      render();
    }
    // A filtered page may be empty and have a next one: a request looks at a limited number of leaves.
    if (!rows.length && next !== null) more();
  }
  await more();
}

/** Fills the list of dtypes to filter by. @param {string[]} names */
function offer(names) {
  if (dtype.options.length > 1) return;
  for (const name of names) dtype.append(make("option", { value: name }, name));
  dtype.value = names.includes(recalled("dtype") ?? "") ? (recalled("dtype") ?? "") : "";
}

let timer = 0;
input.addEventListener("input", () => {
  clearTimeout(timer);
  timer = window.setTimeout(search, 120);
});
for (const select of [dtype, larger])
  select.addEventListener("change", () => {
    search();
  });
find("#search").addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(timer);
  search();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
  if (event.key === "/" && !typing) {
    event.preventDefault();
    input.focus();
    input.select();
  }
  if (event.key === "Escape" && event.target === input) {
    input.value = "";
    search();
  }
});
holder.addEventListener("keydown", keys);
input.addEventListener("keydown", searchKeys);
for (const [name, value] of Object.entries({
  role: "combobox",
  "aria-controls": holder.id,
  "aria-haspopup": "tree",
  "aria-expanded": "true",
  "aria-autocomplete": "list",
}))
  input.setAttribute(name, value);
holder.addEventListener("focus", () => {
  if (!current && root?.total) pick(itemBelow(root, 0), false);
});
holder.addEventListener("scroll", () => requestAnimationFrame(render));
new ResizeObserver(render).observe(holder);
copiers(picked, () => current?.row()?.path ?? "", code);
copiers(found, () => "", () => api(`checkpoints/${checkpoint}/found/snippet`, asked()));

addEventListener("pagehide", () => {
  try {
    sessionStorage.setItem(`tree ${checkpoint}`, location.search); // the tab of a leaf's page leads back to this view
  } catch {
    /* storage may be forbidden */
  }
});
larger.value = [...larger.options].some((option) => option.value === recalled("larger"))
  ? (recalled("larger") ?? "")
  : "";
await browse();
if (filtered()) await search();
else if (recalled("open")) await restore(recalled("open") ?? "");
