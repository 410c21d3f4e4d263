// @ts-check
/** The panel of what a run is resumed from: which snippets show, and their copy buttons. */
import { buttonGroup, copy, find, recalled, remember } from "./dom.js";

const panel = document.querySelector("#resume");
const forms = ["manager", "load", "command"];

if (panel instanceof HTMLElement) {
  const found = forms.filter((form) => panel.querySelector(`.snippet[data-form="${form}"]`));
  const there = found.length ? found : forms;
  const choose = (/** @type {string} */ form) => {
    panel.dataset.form = form;
    remember({ snippet: form === there[0] ? null : form });
  };
  const press = buttonGroup("data-form", choose);
  for (const form of forms) find(`button[data-form="${form}"]`).hidden = !there.includes(form);
  const first = there.find((form) => form === recalled("snippet")) ?? there[0];
  find("#resume .seg").hidden = there.length < 2;
  press(first);
  panel.dataset.form = first;
  panel.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest(".snippet button") : null;
    const code = button?.parentElement?.querySelector("code");
    if (button instanceof HTMLElement && code) copy(button, `${code.textContent?.trim()}\n`);
  });
}
