"""The page that asks for the token. It brings its style with it: without the token no file is served."""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root { color-scheme: light dark; }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; font: 15px/1.5 system-ui, sans-serif;
  background: light-dark(#f5f6f9, #0e1219); color: light-dark(#17202e, #e5e9f1); }
main { box-sizing: border-box; width: min(420px, 92vw); padding: 26px 30px 30px; border-radius: 12px;
  background: light-dark(#fff, #161c26); border: 1px solid light-dark(#e2e6ee, #283142); }
h1 { margin: 0 0 8px; font-size: 21px; letter-spacing: -.01em; }
p { margin: 0 0 16px; color: light-dark(#5a6577, #98a4b8); }
.wrong { color: light-dark(#b3261e, #ff8f85); }
code { font: 13.5px ui-monospace, monospace; }
label { display: grid; gap: 4px; font-size: 13px; color: light-dark(#5a6577, #98a4b8); }
input, button { box-sizing: border-box; width: 100%; font: inherit; font-size: 15px; padding: 8px 12px;
  border-radius: 8px; }
input { color: inherit; background: light-dark(#f5f6f9, #0e1219); border: 1px solid light-dark(#8b93a3, #5b677a); }
button { margin-top: 14px; border: 0; font-weight: 560; cursor: pointer; background: light-dark(#1f5fbf, #7fb0f5);
  color: light-dark(#fff, #161c26); }
:focus-visible { outline: 2px solid light-dark(#1f5fbf, #9cc3fa); outline-offset: 2px; }
"""
POLICY = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
)
"""The content security policy of this page: nothing but the style above."""


def login_page(*, wrong: bool) -> str:
    """Returns the page as HTML.

    Args:
        wrong: whether the request had a token that is not the right one.
    """
    problem = '<p class="wrong" role="alert">This is not the token of this dashboard.</p>' if wrong else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Token · treeckpt</title><style>{STYLE}</style></head>
<body><main><h1>This dashboard needs its token</h1>
{problem}<p>Open the address that <code>treeckpt dashboard</code> printed, or give the token here.</p>
<form method="get"><label>Token <input name="token" type="password" autocomplete="off" required autofocus></label>
<button>Open</button></form></main></body></html>
"""
