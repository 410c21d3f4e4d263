// @ts-check
/**
 * The light or dark scheme: that of the system until a person chooses one, which the browser stores. Runs before the
 * page is drawn.
 */
(() => {
  const KEY = "treeckpt-theme";
  const root = document.documentElement;
  /** @type {string | null} */
  let kept = null;
  try {
    kept = localStorage.getItem(KEY);
  } catch {
    /* storage may be forbidden: then the choice is not stored */
  }
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const tell = () => {
    for (const button of document.querySelectorAll("button.theme"))
      button.setAttribute("aria-pressed", String(dark()));
    document.dispatchEvent(new Event("theme"));
  };
  system.addEventListener("change", tell);
  document.addEventListener("DOMContentLoaded", () => {
    for (const button of document.querySelectorAll("button.theme")) {
      button.removeAttribute("hidden");
      button.addEventListener("click", () => {
        root.dataset.theme = dark() ? "light" : "dark";
        try {
          localStorage.setItem(KEY, root.dataset.theme);
        } catch {
          /* as above */
        }
        tell();
      });
    }
    tell();
  });
})();
