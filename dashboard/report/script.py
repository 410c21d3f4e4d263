"""The script and the style sheet of a report: modules of the pages in one script, with what the API answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([^"]+)";\n', re.M)
_EXPORTED = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.M)
_LIST = re.compile(r"^(.*)export\{([^}]*)\};?\s*$", re.S)
"""The end of a minified library, which names what it exports."""
_LICENSED = re.compile(r"(vendor/[a-z0-9-]+?)-\d+\.\d")
_COMMENT = re.compile(r"^[ \t]*/\*\*(?:(?!\*/).)*\*/[ \t]*\n|^// @ts-check\n", re.M | re.S)


def _static(name: str) -> str:
    return (files("treeckpt_dashboard") / "static" / name).read_text("utf-8")


def style() -> str:
    """Returns the style sheet: that of the pages, and what only a report has."""
    return _static("base.css") + _static("report.css")


def script(modules: Sequence[str], answers: Mapping[str, Any]) -> str:
    """Returns a script that runs modules one after the other.

    Each module that is imported becomes a function, which is called once and returns what it exports.

    Args:
        answers: what the API answers, by address: the modules send no requests.
    """
    joined: dict[str, str] = {}

    def add(name: str) -> None:
        if name in joined:
            return
        text = _COMMENT.sub("", _static(name))
        for _, imported in _IMPORT.findall(text):
            add(imported)
        exported = _EXPORTED.findall(text)
        if found := _LIST.match(text):
            text, exported = found[1], [": ".join(reversed(one.split(" as "))) for one in found[2].split(",")]
        if licensed := _LICENSED.match(name):
            text = f"/*\n{_static(f'{licensed[1]}-LICENSE')}*/\n{text}"
        body = _IMPORT.sub(lambda one: f"const {{{one[1]}}} = {_name(one[2])};\n", text)
        body = re.sub(r"^export ", "", body, flags=re.M)
        joined[name] = f"const {_name(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"

    for module in modules:
        add(module)
    data = json.dumps(msgspec.to_builtins(answers)).replace("<", "\\u003c")
    return f'"use strict";\nglobalThis.answers = {data};\n{"".join(joined.values())}'


def _name(module: str) -> str:
    return "m_" + re.sub(r"\W", "_", module)
