// @ts-check
/**
 * The page of a verification: while one runs, it requests the page twice a second and replaces what has changed. The
 * content comes from the server's page, parsed as a document: no text becomes HTML here.
 */

import { find, reason } from "./dom.js";

const PAUSE = 500;
let timer = 0;

const running = () => find("#verification").dataset.running === "1";

async function ask() {
  const response = await fetch(location.href, { headers: { accept: "text/html" }, cache: "no-store" });
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const now = page.getElementById("verification");
  const old = find("#verification");
  if (!now || now.isEqualNode(old)) return;
  const action = /** @type {HTMLButtonElement | null} */ (document.activeElement)?.name;
  old.replaceWith(document.importNode(now, true));
  if (action === "action")
    /** @type {HTMLElement | null} */ (document.querySelector("#verification button"))?.focus();
}

function plan() {
  clearTimeout(timer);
  if (document.hidden || !running()) return;
  timer = window.setTimeout(
    () =>
      ask()
        .catch((error) => {
          document.title = `No news: ${reason(error)}`;
        })
        .finally(plan),
    PAUSE,
  );
}

document.addEventListener("visibilitychange", plan);
plan();
