// @ts-check
/** The help about the keys of a page: a dialog that `?` and a button in the foot open. */
import { find } from "./dom.js";

const dialog = /** @type {HTMLDialogElement} */ (find("#keys"));
const button = find("#show-keys");

/** Whether keys are text for the element that has the focus. @param {EventTarget | null} target */
const typing = (target) => target instanceof Element && target.matches("input, select, textarea");

button.hidden = false;
button.addEventListener("click", () => dialog.showModal());
document.addEventListener("keydown", (event) => {
  if (event.key !== "?" || typing(event.target) || dialog.open) return;
  event.preventDefault();
  dialog.showModal();
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close(); // the backdrop
});
