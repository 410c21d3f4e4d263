// @ts-check
/**
 * The items of a tree view. Every open item knows how many rows are below it, so that a row is found by its number, and
 * items are created when they come into view.
 */

/**
 * A node as the server sends it.
 * @typedef {{
 *   node: string, key: string, path: string, kind: string, children: number, leaves: number, nbytes: number,
 *   share: number, leaf: number | null, text: string,
 * }} Row
 */
/**
 * What an item shows: its row, null while that is fetched; its name; `times` for a folded block that is repeated;
 * `real` if it is one node of the tree; and its children, which `expand` fetches.
 * @typedef {{
 *   row: () => Row | null, name: (row: Row) => string, times: number, real: boolean, expand: () => Promise<Children>,
 * }} Content
 */
/** @typedef {{ count: number, child: (at: number) => Content }} Children */
/**
 * `total` counts the rows below an item, `opened` has the positions of its open children.
 * @typedef {Content & {
 *   parent: Item | null, at: number, level: number, open: boolean, total: number, children: Children | null,
 *   created: Map<number, Item>, opened: number[],
 * }} Item
 */

/** @param {Item | null} parent @param {number} at @param {Content} content @returns {Item} */
export const itemOf = (parent, at, content) => ({
  ...content,
  parent,
  at,
  level: parent ? parent.level + 1 : 0,
  open: false,
  total: 0,
  children: null,
  created: new Map(),
  opened: [],
});

/** The child at a position. @param {Item} item @param {number} at */
export function childAt(item, at) {
  let child = item.created.get(at);
  if (!child && item.children) {
    child = itemOf(item, at, item.children.child(at));
    item.created.set(at, child);
  }
  return /** @type {Item} */ (child);
}

/** The item of a row, by its number below another item. @param {Item} item @param {number} number @returns {Item} */
export function itemBelow(item, number) {
  let extra = 0;
  for (const at of item.opened) {
    const child = childAt(item, at);
    if (number <= at + extra) break;
    if (number <= at + extra + child.total) return itemBelow(child, number - at - extra - 1);
    extra += child.total;
  }
  return childAt(item, number - extra);
}

/** The number of the row of an item. @param {Item} item @returns {number} */
export function numberOf(item) {
  if (!item.parent) return -1;
  const { parent, at } = item;
  const before = parent.opened.filter((other) => other < at);
  return numberOf(parent) + 1 + at + before.reduce((sum, other) => sum + childAt(parent, other).total, 0);
}

/** Adds rows below an item. @param {Item} item @param {number} more */
function addRows(item, more) {
  for (let at = /** @type {Item | null} */ (item); at; at = at.parent) {
    at.total += more;
    if (at !== item && !at.open) break;
  }
}

/** Whether an item is known to have children. @param {Item} item */
export const canOpen = (item) => {
  const row = item.row();
  return row !== null && row.leaf === null && row.children > 0;
};

/**
 * Opens or closes an item that has a parent. An item whose children cannot be fetched opens without any.
 * @param {Item} item @param {boolean} open @param {(error: unknown) => void} failed
 */
export async function setOpen(item, open, failed) {
  const parent = /** @type {Item} */ (item.parent);
  item.open = open;
  parent.opened = parent.opened.filter((at) => at !== item.at);
  if (!open) return addRows(item, -item.total);
  item.children ??= await item.expand().catch((error) => {
    failed(error);
    return { count: 0, child: () => item };
  });
  parent.opened = [...parent.opened, item.at].sort((a, b) => a - b);
  addRows(item, item.children.count + item.opened.reduce((sum, at) => sum + childAt(item, at).total, 0));
}
