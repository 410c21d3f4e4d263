"""What a person copies to use a leaf elsewhere: its path, and the line of Python that loads it."""

from __future__ import annotations

import msgspec

__all__ = ["SnippetPage", "snippet_page"]


class SnippetPage(msgspec.Struct, frozen=True):
    """Text to be copied."""

    path: str
    snippet: str


def snippet_page(checkpoint: str, path: str) -> SnippetPage:
    """How to load the leaf, or all below the node, at `path` of the checkpoint in a directory.

    Names are written as Python literals of ASCII alone, so that nothing hidden in one is pasted.
    """
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in path)
    select = f", select={[escaped]!a}" if path else ""
    return SnippetPage(path, f"import treeckpt as tc\n\ntree = tc.load({checkpoint!a}{select})\n")
