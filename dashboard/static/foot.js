// @ts-check
/** The foot of every page: the help about its keys, which `?` opens, and what is taken away: its link, its pictures. */
import { copy, find, make } from "./dom.js";

/** The title of the part of the page that an element is in. @param {Element} element */
const titleOf = (element) =>
  element.closest("section, main")?.querySelector("h1, h2")?.childNodes[0]?.textContent?.trim() ?? document.title;

/** Saves all canvases of a part of the page as one picture, on its background. @param {Element} part */
function savePicture(part) {
  const canvases = [...part.querySelectorAll("canvas")].filter((canvas) => canvas.width && canvas.height);
  const picture = document.createElement("canvas");
  picture.width = Math.max(0, ...canvases.map((canvas) => canvas.width));
  picture.height = canvases.reduce((sum, canvas) => sum + canvas.height, 0);
  const g = picture.getContext("2d");
  if (!g || !picture.width) return;
  g.fillStyle = getComputedStyle(part.closest(".card") ?? document.body).backgroundColor;
  g.fillRect(0, 0, picture.width, picture.height);
  let top = 0;
  for (const canvas of canvases) {
    g.drawImage(canvas, 0, top);
    top += canvas.height;
  }
  picture.toBlob((blob) => {
    if (!blob) return;
    const href = URL.createObjectURL(blob);
    const name = `${document.title} ${titleOf(part)}`.replace(/[^\w.=-]+/g, "_");
    make("a", { href, download: `${name}.png` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10_000);
  });
}

for (const part of document.querySelectorAll(".drawing, .chart")) {
  const title = titleOf(part);
  const button = make("button", { type: "button", class: "png", "aria-label": `${title} as PNG` }, "PNG");
  button.addEventListener("click", () => savePicture(part));
  part.after(make("p", { class: "pngs" }, button));
}

// buttons take clicks once all scripts have run: see style.css
document.addEventListener("DOMContentLoaded", () => document.documentElement.toggleAttribute("data-scripts", true));

// what is cut by its cell says all of it
document.addEventListener("pointerover", ({ target }) => {
  if (!(target instanceof Element)) return;
  const cut = [target, target.parentElement, target.parentElement?.parentElement].find(
    (part) => part instanceof HTMLElement && getComputedStyle(part).textOverflow === "ellipsis",
  );
  if (cut instanceof HTMLElement && cut.scrollWidth > cut.clientWidth) cut.title ||= cut.innerText.trim();
});

const link = find("#copy-link");
link.hidden = false;
link.addEventListener("click", () => copy(link, location.href));

const dialog = /** @type {HTMLDialogElement} */ (find("#keys"));
const help = find("#show-keys");

/** Whether keys are text for the element that has the focus. @param {EventTarget | null} target */
const typing = (target) => target instanceof Element && target.matches("input, select, textarea");

help.hidden = false;
help.addEventListener("click", () => dialog.showModal());
document.addEventListener("keydown", (event) => {
  if (event.key !== "?" || typing(event.target) || dialog.open) return;
  event.preventDefault();
  dialog.showModal();
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close(); // the backdrop
});
