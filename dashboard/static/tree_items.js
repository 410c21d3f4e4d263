// @ts-check
/**
 * The items of a tree view. Every open item knows how many rows are below it, so that a row is found by its number, and
 * items are created when they come into view. The nodes of a checkpoint are fetched page by page, with repeated blocks
 * folded.
 */
import { api } from "./dom.js";

/**
 * A node as the server sends it.
 * @typedef {{
 *   node: string, key: string, path: string, kind: string, children: number, leaves: number, nbytes: number,
 *   share: number, leaf: number | null, text: string, damaged: number,
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
    // Rows below a closed item are added to those above it when it opens.
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

/**
 * Children `start` to `stop` of a node are `blocks` equal blocks; `skip` characters separate the name of a block from
 * the rest of a child's key.
 * @typedef {{
 *   start: number, stop: number, blocks: number, title: string, names: string[], skip: number, leaves: number,
 *   nbytes: number, damaged: number[],
 * }} Fold
 */

const PAGE = 100;

/**
 * The nodes of one checkpoint. Returns the function that fetches the children of a node.
 * @param {string} checkpoint @param {() => void} fetched is called when a page has arrived
 * @param {(error: unknown) => void} failed @param {(dtypes: string[]) => void} offer gets all dtypes
 */
export function nodesOf(checkpoint, fetched, failed, offer) {
  /** @type {Map<string, Row[] | null>} */
  const pages = new Map();

  /**
   * The row of a node by its position among the children of another one; null while it is fetched.
   * @param {string} node @param {number} position
   * @returns {Row | null}
   */
  function rowAt(node, position) {
    const start = Math.floor(position / PAGE) * PAGE;
    const key = `${node}:${start}`;
    const found = pages.get(key);
    if (found === undefined) {
      pages.set(key, null);
      api(`checkpoints/${checkpoint}/tree`, { node, start })
        .then((page) => {
          pages.set(key, page.rows);
          fetched();
        })
        .catch((error) => {
          // The next look at the row requests it again.
          pages.delete(key);
          failed(error);
        });
    }
    return found?.[position - start] ?? null;
  }

  /**
   * Children `from:to` of a node, without folds.
   * @param {string} node @param {number} from @param {number} to @param {(key: string) => string} shorten
   * @returns {Children}
   */
  const range = (node, from, to, shorten) => ({
    count: to - from,
    child: (at) => nodeItem(node, from + at, shorten),
  });

  /**
   * @param {string} node @param {number} position @param {(key: string) => string} [shorten]
   * @returns {Content}
   */
  function nodeItem(node, position, shorten = (key) => key) {
    const row = () => rowAt(node, position);
    return {
      row,
      name: (found) => shorten(found.key),
      times: 0,
      real: true,
      expand: async () => childrenOf(row()?.node ?? ""),
    };
  }

  /** The children of a node, repeated blocks folded. @param {string} node @returns {Promise<Children>} */
  async function childrenOf(node) {
    const found = /** @type {{ children: number, dtypes: string[], folds: Fold[] }} */ (
      await api(`checkpoints/${checkpoint}/folds`, { node })
    );
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

  /** @param {string} node @param {Fold} fold @returns {Content} */
  function foldItem(node, fold) {
    const length = (fold.stop - fold.start) / fold.blocks;
    /** @param {string} key @param {number[]} damaged of each block @param {number} children @returns {Row} */
    const summary = (key, damaged, children) => ({
      node: "",
      key,
      path: "",
      kind: "fold",
      children,
      leaves: (fold.leaves / fold.blocks) * damaged.length,
      nbytes: (fold.nbytes / fold.blocks) * damaged.length,
      share: 0,
      leaf: null,
      text: damaged.length > 1 ? `${damaged.length} equal blocks` : "block",
      damaged: damaged.reduce((sum, count) => sum + count, 0),
    });
    /** @param {number} block @returns {Content} */
    const blockItem = (block) => {
      const from = fold.start + block * length;
      const name = fold.names[block];
      if (length === 1 && !fold.skip) return nodeItem(node, from);
      return {
        row: () => summary(name, [fold.damaged[block]], length),
        name: () => name,
        times: 0,
        real: false,
        expand: async () => range(node, from, from + length, (key) => key.slice(name.length + fold.skip)),
      };
    };
    return {
      row: () => summary(fold.title, fold.damaged, fold.blocks),
      name: () => fold.title,
      times: fold.blocks,
      real: false,
      expand: async () => ({ count: fold.blocks, child: blockItem }),
    };
  }

  return childrenOf;
}
