// @ts-check
/**
 * Keeps a page that changes up to date: of runs, of saves, of work that the server does. It requests the page every two
 * seconds while the person follows it or a save is in progress, twice a second while a run is read for the first time
 * or while what is marked `data-soon` is busy, never while the page is hidden. What has not changed is answered with a
 * 304, and after QUIET the page says since when nothing has. It replaces the parts that are marked `data-live`; these
 * come from the server's page, parsed as a document: no text becomes HTML here.
 */

import { clockText, reason, remember } from "./dom.js";

const PAUSE = 2000;
const SOON = 500;
/** Milliseconds after which the page says that nothing has changed. */
const QUIET = 60_000;
/** Where a page can be followed, the button that begins and ends that. @type {HTMLButtonElement | null} */
const button = document.querySelector("#follow");
const news = document.querySelector("#news");
/** Milliseconds without a key after which the list is filtered. */
const TYPING_PAUSE = 120;
let tag = "";
let shown = location.href;
let timer = 0;
let failed = false;

const query = new URLSearchParams(location.search);
let following = button !== null && query.get("follow") !== "0" && !query.has("start") && !query.has("cursor");

const has = (/** @type {string} */ selector) => document.querySelector(selector) !== null;
const loading = () => has(".scanning progress");
const busy = () => has('[data-live][data-busy="1"]');
const soon = () => loading() || has('[data-soon][data-busy="1"]');

/** When the server last saw a change of what the page shows; NaN where it does not say. */
const changedAt = () => {
  const holder = /** @type {HTMLElement | null} */ (document.querySelector("[data-changed]"));
  return Date.parse(holder?.dataset.changed ?? "");
};

/** @param {number} ms */
const clock = (ms) => `${new Date(ms).toISOString().slice(11, 16)} UTC`;

/** @param {string} text */
function tell(text) {
  if (news) news.textContent = text;
  else if (text) document.title = text;
}

function showButton() {
  button?.toggleAttribute("hidden", false);
  button?.setAttribute("aria-pressed", String(following));
  const about = /** @type {HTMLElement | null} */ (document.querySelector("#follow-about"));
  if (about) about.textContent = (following ? about.dataset.on : about.dataset.off) ?? "";
}

button?.addEventListener("click", () => {
  following = !following;
  remember({ follow: following ? null : "0" });
  showButton();
  plan(0);
});

/** The checkpoints of the page. @param {ParentNode} root */
const rows = (root) =>
  new Map(
    [...root.querySelectorAll("tr[data-id]")].map((row) => [
      /** @type {HTMLElement} */ (row).dataset.id,
      /** @type {HTMLElement} */ (row),
    ]),
  );

/** @param {Document} page @param {boolean} other whether the page is another one than the one that is shown */
function take(page, other) {
  const before = loading() || other ? new Map() : rows(document);
  const focused = /** @type {HTMLElement | null} */ (document.activeElement);
  const same = ["href", "name"].filter((attribute) => focused?.hasAttribute(attribute));
  for (const old of document.querySelectorAll("[data-live]")) {
    const now = page.getElementById(old.id);
    // What is the same stays, with its focus and what is selected in it.
    if (!now || now.isEqualNode(old)) continue;
    const open = [...old.querySelectorAll("details")].map((details) => details.open);
    const taken = /** @type {HTMLElement} */ (document.importNode(now, true));
    old.replaceWith(taken);
    taken.querySelectorAll("details").forEach((details, at) => {
      details.open = open[at] ?? details.open;
    });
  }
  const fresh = [...rows(document)].filter(([id]) => !before.has(id));
  if (before.size) for (const [, row] of fresh) row.classList.add("fresh");
  if (before.size && fresh.length)
    tell(fresh.length === 1 ? `New: ${fresh[0][1].querySelector("a")?.textContent}` : `${fresh.length} new`);
  if (focused && same.length && document.activeElement === document.body) {
    // what had the focus is gone: what leads to the same, or is called so
    const others = /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("main a, main button"));
    [...others].find((other) => same.every((name) => other.getAttribute(name) === focused.getAttribute(name)))?.focus();
  }
}

async function ask() {
  const headers = { accept: "text/html", ...(tag ? { "If-None-Match": tag } : {}) };
  const asked = location.href;
  const response = await fetch(asked, { headers, cache: "no-store" });
  if (failed) {
    failed = false;
    tell("");
  }
  if (response.ok || response.status === 304) showTime(response);
  if (response.status === 304) return;
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  const text = await response.text();
  if (asked !== location.href) return; // the filter has changed meanwhile
  tag = response.headers.get("ETag") ?? "";
  take(new DOMParser().parseFromString(text, "text/html"), shown !== asked);
  shown = asked;
  document.dispatchEvent(new Event("taken"));
}

/** Writes for what time the page is right: that of the server's answer. @param {Response} response */
function showTime(response) {
  const at = Date.parse(response.headers.get("date") ?? "");
  for (const time of document.querySelectorAll("[data-as-of]"))
    if (!Number.isNaN(at)) time.textContent = clockText(at / 1000);
}

/** Requests the page, tells what went wrong, and plans the next request. */
export const refresh = () =>
  ask()
    .catch((error) => {
      failed = true;
      tell(`No news: ${reason(error)}`);
    })
    .finally(() => plan());

/** @param {number} [pause] */
function plan(pause = soon() ? SOON : PAUSE) {
  clearTimeout(timer);
  const changed = changedAt();
  if (following && !failed && Date.now() - changed > QUIET) tell(`Nothing new since ${clock(changed)}`);
  if (document.hidden || !(following || busy())) return;
  timer = window.setTimeout(refresh, pause);
}

const filter = document.querySelector("input[data-filter]");
if (filter instanceof HTMLInputElement) {
  let typing = 0;
  filter.addEventListener("input", () => {
    clearTimeout(typing);
    typing = window.setTimeout(() => {
      remember({ q: filter.value.trim() });
      refresh();
    }, TYPING_PAUSE);
  });
}

/** The units of "3 min ago", in the words of the server. */
const UNITS = /** @type {const} */ ([
  [86_400, "day"],
  [3600, "h"],
  [60, "min"],
]);

/** @param {number} seconds */
function agoText(seconds) {
  for (const [unit, name] of UNITS) {
    const count = Math.floor(seconds / unit);
    if (count >= 1) return `${count.toLocaleString("en")} ${name}${name === "day" && count > 1 ? "s" : ""} ago`;
  }
  return "just now";
}

setInterval(() => {
  for (const time of document.querySelectorAll("time[data-ago]")) {
    const at = Date.parse(time.getAttribute("datetime") ?? "");
    const text = Number.isNaN(at) ? time.textContent : agoText((Date.now() - at) / 1000);
    if (time.textContent !== text) time.textContent = text;
  }
}, 20_000);

document.addEventListener("visibilitychange", () => plan(0));
showButton();
plan();
