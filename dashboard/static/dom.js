// @ts-check
/** What every page needs: elements, text without hidden characters, formatted numbers, and requests to the API. */

/**
 * Writes characters without a glyph of their own, and characters that reorder others, as escapes.
 * @param {unknown} text
 */
export function visible(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu, (c) => {
    const code = /** @type {number} */ (c.codePointAt(0));
    const hex = code.toString(16);
    return code < 0x100
      ? `\\x${hex.padStart(2, "0")}`
      : code < 0x10000
        ? `\\u${hex.padStart(4, "0")}`
        : `\\U${hex.padStart(8, "0")}`;
  });
}

/**
 * Creates an element with attributes and children; a string becomes a text node, never HTML.
 * @param {string} name
 * @param {Record<string, string | number | boolean | null | undefined>} [attributes]
 * @param {(Node | string | null)[]} children
 * @returns {HTMLElement}
 */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false)
      element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children)
    if (child !== null) element.append(typeof child === "string" ? visible(child) : child);
  return element;
}

/**
 * @template {Element} [T=HTMLElement]
 * @param {string} selector
 * @returns {T}
 */
export function find(selector) {
  const element = document.querySelector(selector);
  if (!element) throw new Error(`no ${selector} on this page`);
  return /** @type {T} */ (/** @type {unknown} */ (element));
}

/** The relative link to the dashboard's root, as the server wrote it. */
export const base = document.body.dataset.base ?? "./";

/** What the API answered when a report was made, by address: a report sends no requests, and has no other pages. */
const answers = /** @type {{ answers?: Record<string, any> }} */ (globalThis).answers;
export const isReport = answers !== undefined;

/**
 * Adds parameters to those of an address; empty values are left out.
 * @param {URLSearchParams} parameters
 * @param {Record<string, string | number | string[] | null | undefined>} values several of one name are a list
 */
function addParameters(parameters, values) {
  for (const [name, value] of Object.entries(values))
    for (const one of Array.isArray(value) ? value : [value ?? ""])
      if (one !== "") parameters.append(name, String(one));
}

/**
 * Requests the JSON of one API address.
 * @param {string} path
 * @param {Record<string, string | number | string[] | null | undefined>} [query]
 * @param {AbortSignal} [signal]
 */
export async function api(path, query = {}, signal) {
  const parameters = new URLSearchParams();
  addParameters(parameters, query);
  const text = parameters.toString();
  const address = `${path}${text ? `?${text}` : ""}`;
  if (answers) return answers[address];
  const response = await fetch(`${base}api/v1/${address}`, {
    signal,
    headers: { accept: "application/json" },
  });
  // A proxy may answer with a page of its own.
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error ?? `the server answered ${response.status}`);
  return body;
}

/** A number with so many digits, at most. @param {number} n @param {number} [digits] */
export const figure = (n, digits = 3) => String(Number(n.toPrecision(digits)));

export const BYTE_UNITS = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];

/** @param {number} nbytes @param {number} [digits] for marks of an axis: as many as tell them apart */
export function bytesText(nbytes, digits) {
  let unit = 0;
  while (Math.abs(nbytes) >= 999.5 && unit < BYTE_UNITS.length - 1) {
    nbytes /= 1000;
    unit += 1;
  }
  return `${unit || digits ? figure(nbytes, digits) : Math.round(nbytes)} ${BYTE_UNITS[unit]}`;
}

/**
 * A duration as the server writes it.
 * @param {number} seconds @param {number} [digits] for marks of an axis: as many as tell them apart
 */
export function secondsText(seconds, digits) {
  const whole = digits ? Number(seconds.toPrecision(digits)) : Math.round(seconds);
  if (whole >= 3600) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  if (seconds >= 99.95) return `${Math.floor(whole / 60)} min ${figure(whole % 60)} s`;
  if (seconds >= 0.9995) return `${figure(seconds, digits)} s`;
  const small = seconds >= 0.9995e-3 || seconds === 0;
  return small ? `${figure(seconds * 1e3, digits)} ms` : `${figure(seconds * 1e6, digits)} µs`;
}

/** A Unix time to the second. @param {number} seconds */
export const clockText = (seconds) => `${new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;

/** @param {number} n */
export const numberText = (n) => n.toLocaleString("en");

/** `1 leaf`, `2 leaves`. @param {number} count @param {string} one @param {string} several */
export const countText = (count, one, several = `${one}s`) => `${numberText(count)} ${count === 1 ? one : several}`;

/** What the address says of the view. @param {string} name */
export const recalled = (name) => new URLSearchParams(location.search).get(name);

/**
 * Writes the state of the view into the address, so that it can be sent to somebody.
 * @param {Record<string, string | number | string[] | null | undefined>} state empty values are left out
 */
export function remember(state) {
  if (isReport) return;
  const address = new URL(location.href);
  for (const name of Object.keys(state)) address.searchParams.delete(name);
  addParameters(address.searchParams, state);
  history.replaceState(history.state, "", address);
}

/**
 * A group of buttons of which one is pressed. Returns the function that presses the button of a value.
 * @param {string} attribute holds the value of a button @param {(value: string) => void} choose is called on a click
 */
export function buttonGroup(attribute, choose) {
  const buttons = [...document.querySelectorAll(`button[${attribute}]`)];
  const press = (/** @type {string} */ value) => {
    for (const button of buttons)
      button.setAttribute("aria-pressed", String(button.getAttribute(attribute) === value));
  };
  for (const button of buttons)
    button.addEventListener("click", () => {
      const value = button.getAttribute(attribute) ?? "";
      press(value);
      choose(value);
    });
  return press;
}

/** What went wrong, as a person reads it. @param {unknown} error */
export const reason = (error) => (error instanceof Error ? error.message : String(error));

/**
 * Runs what fetches and draws a part of a page; its readout says that it loads, or what failed, with a button to retry.
 * @param {HTMLElement} readout @param {string} what the part is @param {() => Promise<void>} load
 */
export async function drawn(readout, what, load) {
  const loading = `${what}: loading …`;
  readout.textContent = loading;
  try {
    await load();
    if (readout.textContent === loading) readout.textContent = "\u00a0";
  } catch (error) {
    const again = make("button", { type: "button", class: "plain" }, "Try again");
    again.addEventListener("click", () => drawn(readout, what, load));
    readout.replaceChildren(visible(`${what}: could not be drawn: ${reason(error)} `), again);
  }
}

/**
 * Copies text to the clipboard, and shows that on the button.
 * @param {HTMLElement} button @param {string | Promise<string>} text
 */
export async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(await text);
    button.textContent = "Copied";
  } catch (error) {
    button.textContent = `Not copied: ${reason(error)}`;
  }
  setTimeout(() => {
    button.textContent = before;
  }, 1500);
}

/**
 * Makes the buttons of a part of the page copy a path, or the Python code that loads what is chosen.
 * @param {ParentNode} part @param {() => string} path
 * @param {(button: Element) => Promise<{ snippet: string }>} code requests the code
 */
export function copiers(part, path, code) {
  for (const button of part.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", () =>
      copy(
        /** @type {HTMLElement} */ (button),
        button.getAttribute("data-copy") === "path" ? path() : code(button).then((found) => found.snippet),
      ),
    );
  }
}

/**
 * Creates a table.
 * @param {string} kind its class @param {HTMLElement[]} head @param {HTMLElement[][]} rows cells of each row
 */
export const tableOf = (kind, head, rows) =>
  make(
    "table",
    { class: kind },
    make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells))),
  );
