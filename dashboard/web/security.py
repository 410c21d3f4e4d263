"""The checks before every request, the page that asks for the token, and the security headers of every response.

One middleware checks in this order: the Host header must be on a list, compared exactly (this refuses the page of
another site whose DNS name points at this machine); the method must be GET or HEAD; a token, if one is required, must
be in a cookie or an Authorization header. A token in the query is exchanged for the cookie once, so that it stays in no
history or log. At most `MAX_REQUESTS` of the requests that pass are answered at a time; refused ones do not count.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import html
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..pages.answers import is_api, json_response

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
TIMEOUT = 60.0
"""Seconds after which a request gets status 503 instead of its answer."""
MAX_REQUESTS = 256
"""Requests that are answered at a time; further ones get status 503."""
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


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


def host_name(header: str) -> tuple[str, str]:
    """Splits a Host header into name and port; the port is empty if there is none.

    Raises:
        ValueError: it is no host.
    """
    if header.startswith("["):
        name, bracket, rest = header.partition("]")
        name += bracket
        separator, port = rest[:1], rest[1:]
    else:
        name, separator, port = header.partition(":")
    plain = name.strip("[]")
    if not plain or separator not in ("", ":") or (separator and not (port.isascii() and port.isdigit())):
        raise ValueError(header)
    return name.lower(), port


class RequestGuard:
    """The middleware.

    Args:
        hosts: allowed names in Host headers; one with a port allows only that port.
        token: None requires none.
        root_path: the path under which a proxy serves the dashboard: it is removed from the path of requests, and is
            the path of the cookie.
    """

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str], token: str | None, root_path: str = "") -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._session = hashlib.sha256(b"treeckpt session " + token.encode()).hexdigest() if token else None
        self._token = token.encode() if token else None
        # browsers share cookies between the ports of a host: two dashboards must not overwrite each other's cookie
        self._cookie = "treeckpt_" + hashlib.sha256(b"treeckpt cookie " + (self._token or b"")).hexdigest()[:8]
        self._root_path = root_path
        # It needs no lock, because all requests are counted in one event loop.
        self._answering = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        head = scope["method"] == "HEAD"
        inner: MutableMapping[str, Any] = {**scope, "method": "GET"} if head else {**scope}
        if scope["path"].startswith(self._root_path + "/"):  # a proxy that does not remove its prefix
            inner["path"] = scope["path"][len(self._root_path) :]
        refusal, sender = self._refusal(scope, inner["path"]), _Sender(send, head)
        if refusal is None and self._answering >= MAX_REQUESTS:
            refusal = _error_answer(inner["path"], "Too many requests at a time.", 503, {"Retry-After": "1"})
        if refusal is not None:
            await refusal(scope, receive, sender)
            return
        self._answering += 1
        try:
            await _answer_in_time(self._app, inner, receive, sender)
        finally:
            self._answering -= 1

    def _refusal(self, scope: Scope, path: str) -> Response | None:
        headers = Headers(scope=scope)
        if not self._host_allowed(headers.getlist("host")):
            text = "This Host header is not allowed. If it is right, start the dashboard with --allow-host NAME."
            return _error_answer(path, text, 400)
        if scope["method"] not in ("GET", "HEAD"):
            return _error_answer(path, "Only GET and HEAD.", 405, {"Allow": "GET, HEAD"})
        return self._login(scope, headers, path) if self._token else None

    def _host_allowed(self, given: list[str]) -> bool:
        try:
            # Of two Host headers a proxy may have looked at the other one.
            name, port = host_name(given[0]) if len(given) == 1 else ("", "")
        except ValueError:
            return False
        return name in self._hosts or f"{name}:{port}" in self._hosts

    def _login(self, scope: Scope, headers: Headers, path: str) -> Response | None:
        assert self._token is not None and self._session is not None, "it is called only if there is a token"
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        offered = [value for name, value in query if name == "token"]
        # In constant time: how long the answer to a wrong token takes tells nothing of the right one.
        if offered and hmac.compare_digest(offered[0].encode("utf-8", "replace"), self._token):
            return self._set_cookie(scope, [pair for pair in query if pair[0] != "token"])
        if hmac.compare_digest(cookie.encode("utf-8", "replace"), self._session.encode()):
            return None
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._token):
            return None
        shown = {"WWW-Authenticate": "Bearer", "Cache-Control": "no-store"}
        if is_api(path) and "text/html" not in headers.get("accept", ""):  # no browser's address bar
            text = "A token is needed, in the header Authorization: Bearer TOKEN. The dashboard's address has it."
            return _error_answer(path, text, 401, shown)
        return HTMLResponse(login_page(wrong=bool(offered)), 401, {**shown, "Content-Security-Policy": POLICY})

    def _set_cookie(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """Sets the cookie on a page that leads on: after a redirect, browsers may not send a Strict cookie."""
        last = quote(scope["path"].rpartition("/")[2])
        target = html.escape(f"./{last}?{urlencode(query)}" if query else f"./{last}", quote=True)
        page = f'<!doctype html><meta http-equiv="refresh" content="0;url={target}"><a href="{target}">Continue</a>'
        response = HTMLResponse(page, headers={"Cache-Control": "no-store"})
        assert self._session is not None, "it is called only if there is a token"
        response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path=self._root_path or "/")
        return response


def _error_answer(path: str, text: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an error: JSON for an address of the API, else text."""
    if is_api(path):
        return json_response({"error": text}, status, headers)
    return PlainTextResponse(f"{text}\n", status, headers)


async def _answer_in_time(app: ASGIApp, scope: Scope, receive: Receive, sender: _Sender) -> None:
    """Answers, or sends status 503 after `TIMEOUT`. A thread cannot be stopped, so its late answer is dropped."""
    task = asyncio.ensure_future(app(scope, receive, sender))
    try:
        await asyncio.wait({task}, timeout=TIMEOUT)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.done():
        task.result()
    elif not sender.started:
        answer = _error_answer(scope["path"], "This took too long and was given up.", 503, {"Retry-After": "30"})
        await answer(scope, receive, sender.replaced())
    else:
        await task


class _Sender:
    """Adds the headers to a response, and drops the body of an answer to HEAD."""

    def __init__(self, send: Send, head: bool) -> None:
        self._send, self._head = send, head
        self.started = self._muted = False

    def replaced(self) -> _Sender:
        """Returns a sender that replaces this one; from now on this one sends nothing."""
        other, self._muted = _Sender(self._send, self._head), True
        return other

    async def __call__(self, message: Message) -> None:
        if self._muted:
            return
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        elif self._head and message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await self._send(message)
