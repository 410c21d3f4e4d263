// @ts-check
/** Keeps "3 min ago" true while a page is open, in the words of the server. */
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
