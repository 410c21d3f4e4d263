"""The style sheet, the script and the Content-Security-Policy of a report."""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root { color-scheme: light dark; --page: #f5f6f9; --card: #fff; --line: #e2e6ee; --text: #17202e; --dim: #5a6577;
  --soft: #eef1f6; --bad: #b3261e; --on: #10151f; }
@media (prefers-color-scheme: dark) { :root { --page: #0e1219; --card: #161c26; --line: #283142; --text: #e5e9f1;
  --dim: #98a4b8; --soft: #1d2531; --bad: #ff8f85; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 28px 20px 60px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }
h1 { font-size: 25px; margin: 0 0 2px; overflow-wrap: anywhere; } h2 { font-size: 15px; margin: 0 0 10px; }
h3 { font-size: 13.5px; margin: 14px 0 4px; font-weight: 600; overflow-wrap: anywhere; }
p { margin: 6px 0; } .dim { color: var(--dim); font-size: 13.5px; } .bad { color: var(--bad); fill: var(--bad); }
code, .mono { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .92em; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px;
  margin: 16px 0; overflow-x: auto; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px 18px; margin: 14px 0; }
dt { font-size: 12.5px; color: var(--dim); } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); font-weight: 400;
  vertical-align: baseline; overflow-wrap: anywhere; }
th { font-size: 12.5px; color: var(--dim); } .n { text-align: right; white-space: nowrap; padding-left: 14px; }
svg { display: block; width: 100%; height: auto; border-radius: 6px; }
text { font-size: 12px; fill: var(--dim); } text.on { fill: var(--on); }
.f0, .l0 { --c: #4c9fd6; } .f1, .l1 { --c: #e69f00; } .f2, .l2 { --c: #2fb88f; } .f3 { --c: #cc79a7; }
.f4 { --c: #7cc4ee; } .f5 { --c: #e2783a; } .f6 { --c: #c9bc1f; } .f7 { --c: #98a0ac; }
rect, circle { fill: var(--c, var(--soft)); } .edge { stroke: var(--card); stroke-width: 1.5; }
.gap { fill: var(--bad); opacity: .35; } .frame { --c: var(--line); } .wait { --c: var(--soft); }
.line { fill: none; stroke: var(--c); stroke-width: 2; } .blocked { stroke: var(--bad); stroke-dasharray: 5 4; }
details details { margin-left: 18px; } summary { cursor: pointer; padding: 2px 0; overflow-wrap: anywhere; }
.leaf { margin-left: 32px; padding: 2px 0; overflow-wrap: anywhere; } .size { color: var(--dim); margin-left: 10px; }
input { font: inherit; font-size: 14px; padding: 5px 12px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--page); color: inherit; width: min(320px, 100%); margin-bottom: 8px; }
@media (max-width: 640px) { text { font-size: 22px; } }
"""

SCRIPT = """
"use strict";
const box = document.getElementById("find");
if (box) {
  const leaves = [...document.querySelectorAll("#tree .leaf")];
  box.hidden = false;
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
    for (const leaf of leaves) leaf.hidden = !words.every((word) => leaf.dataset.path.toLowerCase().includes(word));
    for (const part of [...document.querySelectorAll("#tree details")].reverse()) {
      part.hidden = words.length > 0 && !part.querySelector(".leaf:not([hidden])");
      if (words.length) part.open = true;
    }
  });
}
"""

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
)
"""The page fetches nothing, and only this script runs."""
