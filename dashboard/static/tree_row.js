// @ts-check
/** A row of the tree view as an element. */
import { bytesText, make, numberText } from "./dom.js";
import { canOpen } from "./tree_items.js";

/** @typedef {import("./tree_items.js").Item} Item */
/** @typedef {import("./tree_items.js").Row} Row */

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
  return leaf !== null ? text : `${text} · ${numberText(leaves)} ${leaves === 1 ? "leaf" : "leaves"}`;
}

/**
 * @param {Item} item @param {number} number of the row
 * @param {{ hrefOf: (row: Row) => string, nbytes: number }} checkpoint its links and bytes
 */
export function rowElement(item, number, { hrefOf, nbytes }) {
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
