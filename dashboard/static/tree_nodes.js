// @ts-check
/** The nodes of a checkpoint as items of a tree view: fetched page by page, repeated blocks folded. */
import { api } from "./dom.js";

/** @typedef {import("./tree_items.js").Row} Row */
/** @typedef {import("./tree_items.js").Content} Content */
/** @typedef {import("./tree_items.js").Children} Children */
/**
 * Children `start` to `stop` of a node are `blocks` equal blocks; `skip` characters separate the name of a block from
 * the rest of a child's key.
 * @typedef {{
 *   start: number, stop: number, blocks: number, title: string, names: string[], skip: number, leaves: number,
 *   nbytes: number,
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
    /** @param {string} key @param {number} blocks @param {number} children @returns {Row} */
    const summary = (key, blocks, children) => ({
      node: "",
      key,
      path: "",
      kind: "fold",
      children,
      leaves: (fold.leaves / fold.blocks) * blocks,
      nbytes: (fold.nbytes / fold.blocks) * blocks,
      share: 0,
      leaf: null,
      text: blocks > 1 ? `${blocks} equal blocks` : "block",
    });
    /** @param {number} block @returns {Content} */
    const blockItem = (block) => {
      const from = fold.start + block * length;
      const name = fold.names[block];
      if (length === 1 && !fold.skip) return nodeItem(node, from);
      return {
        row: () => summary(name, 1, length),
        name: () => name,
        times: 0,
        real: false,
        expand: async () => range(node, from, from + length, (key) => key.slice(name.length + fold.skip)),
      };
    };
    return {
      row: () => summary(fold.title, fold.blocks, fold.blocks),
      name: () => fold.title,
      times: fold.blocks,
      real: false,
      expand: async () => ({ count: fold.blocks, child: blockItem }),
    };
  }

  return childrenOf;
}
