// @ts-check
/**
 * Keeps a page of runs or of saves up to date. It requests the page every two seconds while the person follows it or a
 * save is in progress, twice a second while a run is read for the first time, never while the page is hidden. Where all
 * saves have stalled it asks once a minute, and stops following after STALLED_POLLS of these. It replaces the parts
 * that are marked `data-live`; these come from the server's page, parsed as a document: no text becomes HTML here.
 */

import "./ago.js";
import { find, reason, remember } from "./dom.js";

const PAUSE = 2000;
const LOADING_PAUSE = 500;
const STALLED_PAUSE = 60_000;
const STALLED_POLLS = 10;
const button = /** @type {HTMLButtonElement} */ (find("#follow"));
const news = find("#news");
/** Milliseconds without a key after which the list is filtered. */
const TYPING_PAUSE = 120;
let tag = "";
let shown = location.href;
let timer = 0;
let failed = false;
let stalledPolls = 0;

const query = new URLSearchParams(location.search);
let following = query.get("follow") !== "0" && !query.has("start") && !query.has("cursor");
button.hidden = false;

const loading = () => document.querySelector(".scanning progress") !== null;
const stalled = () => document.querySelector('[data-live][data-stalled="1"]') !== null;
const busy = () => document.querySelector('[data-live][data-busy="1"]') !== null;

function showButton() {
  button.setAttribute("aria-pressed", String(following));
}

button.addEventListener("click", () => {
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
  const focused = document.activeElement?.getAttribute("href");
  for (const old of document.querySelectorAll("[data-live]")) {
    const now = page.getElementById(old.id);
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
    news.textContent =
      fresh.length === 1 ? `New: ${fresh[0][1].querySelector("a")?.textContent}` : `${fresh.length} new`;
  if (focused && document.activeElement === document.body) {
    const links = /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("main a"));
    [...links].find((a) => a.getAttribute("href") === focused)?.focus();
  }
}

async function ask() {
  const headers = { accept: "text/html", ...(tag ? { "If-None-Match": tag } : {}) };
  const asked = location.href;
  const response = await fetch(asked, { headers, cache: "no-store" });
  if (failed) {
    failed = false;
    news.textContent = "";
  }
  if (response.status === 304) return;
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  const text = await response.text();
  if (asked !== location.href) return; // the filter has changed meanwhile
  tag = response.headers.get("ETag") ?? "";
  take(new DOMParser().parseFromString(text, "text/html"), shown !== asked);
  shown = asked;
}

/** Requests the page, tells what went wrong, and plans the next request. */
const refresh = () =>
  ask()
    .catch((error) => {
      failed = true;
      news.textContent = `No news: ${reason(error)}`;
    })
    .finally(() => plan());

/** @param {number} [pause] */
function plan(pause = loading() ? LOADING_PAUSE : stalled() ? STALLED_PAUSE : PAUSE) {
  clearTimeout(timer);
  stalledPolls = stalled() ? stalledPolls + 1 : 0;
  if (following && stalledPolls > STALLED_POLLS) {
    following = false;
    stalledPolls = 0;
    news.textContent = "No longer followed: nothing new for ten minutes.";
    showButton();
  }
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

document.addEventListener("visibilitychange", () => plan(0));
showButton();
plan();
