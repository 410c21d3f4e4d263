// @ts-check
/**
 * The search over runs, steps and leaves that Ctrl-K opens on every page: a dialog with a combobox and its list. The
 * server searches; what the page shows (a run or a checkpoint) comes first.
 */
import { api, base, find, make, reason } from "./dom.js";

/** @typedef {{ kind: "run" | "step" | "leaf", text: string, detail: string, href: string }} Item */

const PAUSE = 100;
const KINDS = { run: "Runs", step: "Steps", leaf: "Leaves" };
const at = /\/(?:runs|checkpoints)\/([0-9a-f]{12})(?:\/|$)/.exec(location.pathname)?.[1] ?? "";
const button = /** @type {HTMLButtonElement} */ (find("header .find"));
/** @type {ReturnType<typeof build> | null} */
let palette = null;

/** Creates the dialog, on its first use. */
function build() {
  const input = /** @type {HTMLInputElement} */ (
    make("input", {
      type: "text",
      role: "combobox",
      "aria-label": "A run, a step or a leaf",
      "aria-expanded": "true",
      "aria-controls": "palette-list",
      "aria-autocomplete": "list",
      placeholder: "A run, a step or words of a leaf’s path",
      autocomplete: "off",
      spellcheck: "false",
    })
  );
  const list = make("div", { id: "palette-list", role: "listbox", "aria-label": "What was found", tabindex: "-1" });
  const tell = make("p", { class: "tell", role: "status" });
  const dialog = /** @type {HTMLDialogElement} */ (
    make("dialog", { class: "palette", "aria-label": "Go to" }, input, list, tell)
  );
  document.body.append(dialog);
  return { dialog, input, list, tell };
}

/** @type {HTMLElement[]} */
let options = [];
let chosen = -1;
let timer = 0;
let request = new AbortController();
/** What the list answers. @type {string | null} */
let answered = null;

/** @param {number} to the option that is chosen from now on; beyond an end, the one at the other end */
function choose(to) {
  if (!palette || !options.length) return;
  options[chosen]?.setAttribute("aria-selected", "false");
  chosen = (to + options.length) % options.length;
  const option = options[chosen];
  option.setAttribute("aria-selected", "true");
  palette.input.setAttribute("aria-activedescendant", option.id);
  option.scrollIntoView({ block: "nearest" });
}

/** @param {Item} item @param {number} number */
const optionOf = (item, number) =>
  make(
    "div",
    { role: "option", id: `palette-${number}`, "aria-selected": "false", "data-href": item.href },
    make("span", { class: item.kind, title: item.text }, make("bdi", {}, item.text)),
    make("span", { class: "where" }, item.detail),
  );

/** @param {{ items: Item[], more: boolean, complete: boolean }} page @param {string} q */
function show(page, q) {
  if (!palette) return;
  answered = q;
  options = page.items.map(optionOf);
  chosen = -1;
  palette.input.removeAttribute("aria-activedescendant");
  const groups = /** @type {(keyof typeof KINDS)[]} */ (Object.keys(KINDS)).map((kind) => {
    const members = options.filter((_, n) => page.items[n].kind === kind);
    const title = make("div", { class: "kind", "aria-hidden": "true" }, KINDS[kind]);
    return members.length ? make("div", { role: "group", "aria-label": KINDS[kind] }, title, ...members) : null;
  });
  palette.list.replaceChildren(...groups.filter((group) => group !== null));
  const count = page.items.length;
  const some = page.more ? `The first ${count}` : `${count} found`;
  const found = count ? `${some}, Enter opens one` : q ? "Nothing is called so." : "There is no run.";
  palette.tell.textContent = page.complete ? found : `${found}. Not every leaf was searched.`;
  choose(0);
}

async function search() {
  if (!palette) return;
  const q = palette.input.value.trim();
  request.abort();
  request = new AbortController();
  const { signal } = request;
  try {
    const page = await api("find", { q, at }, signal);
    if (!signal.aborted) show(page, q);
  } catch (error) {
    if (!signal.aborted) palette.tell.textContent = `Not searched: ${reason(error)}`;
  }
}

/** @param {HTMLElement | undefined} option @param {boolean} besides whether it opens in a tab of its own */
function open(option, besides) {
  if (!option) return;
  const address = `${base}${option.dataset.href}`;
  if (besides) window.open(address, "_blank", "noopener");
  else location.assign(address);
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  const steps = /** @type {Record<string, number>} */ ({ ArrowDown: chosen + 1, ArrowUp: chosen - 1 });
  if (event.key in steps) choose(steps[event.key]);
  else if (event.key === "Enter") enter(event.ctrlKey || event.metaKey);
  else return;
  event.preventDefault();
}

/** Opens what is chosen; if more was typed than the list answers, the first that is found. @param {boolean} besides */
async function enter(besides) {
  if (palette?.input.value.trim() !== answered) {
    clearTimeout(timer);
    await search();
  }
  if (palette?.input.value.trim() === answered) open(options[chosen], besides);
}

function start() {
  if (!palette) {
    palette = build();
    const { dialog, input, list } = palette;
    input.addEventListener("input", () => {
      clearTimeout(timer);
      timer = window.setTimeout(search, PAUSE);
    });
    input.addEventListener("keydown", onKey);
    list.addEventListener("click", (event) => {
      const option = event.target instanceof Element ? event.target.closest("[data-href]") : null;
      if (option instanceof HTMLElement) open(option, event.ctrlKey || event.metaKey);
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(); // the backdrop
    });
  }
  if (palette.dialog.open) return;
  palette.dialog.showModal();
  palette.input.select();
  search();
}

button.hidden = false;
button.addEventListener("click", start);
document.addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
  event.preventDefault();
  start();
});
