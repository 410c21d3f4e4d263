"""Takes the README's pictures of the dashboard: `python -m tests.bench.screenshots RUN`.

RUN is one that `treeckpt demo --run RUN --no-serve` has left; the pictures are of its newest checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.bench.dashboard import Browser, Server, serving

__all__ = ["main"]

FOLDER = Path(__file__).parents[2] / "dashboard" / "screenshots"
LEAF = "model layers.0.feed_forward.up.weight"
PICTURES = {
    "timing": ("{at}/timing", 1075),
    "leaf": ("{at}/leaves/{leaf}?region=20:60", 1036),
    "reshard": ("{at}/reshard?mesh=2&names=tp&place=*%3A+Shard(0)", 912),
}
"""The address of each picture, and its height in pixels."""


def _take(server: Server, browser: Browser, name: str) -> None:
    path, height = PICTURES[name]
    at = f"checkpoints/{server.checkpoint()}"
    leaf = server.json(f"{at}/search?q={LEAF.replace(' ', '%20')}")["rows"][0]["leaf"] if "{leaf}" in path else ""
    browser.page.set_viewport_size({"width": 1280, "height": height})
    browser.page.goto(server.address + path.format(at=at, leaf=leaf), wait_until="networkidle")
    browser.page.wait_for_timeout(500)  # until what the scripts fetched is drawn
    browser.page.screenshot(path=FOLDER / f"{name}.png")


def main() -> None:
    """Takes the pictures that were asked for, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.screenshots", description=__doc__)
    parser.add_argument("run", type=Path, help="a run that `treeckpt demo` has left")
    parser.add_argument("--only", choices=list(PICTURES), action="append", help="these pictures alone")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as cache, sync_playwright() as playwright:
        browser = Browser(playwright)
        try:
            with serving(options.run, Path(cache)) as server:
                for name in options.only or PICTURES:
                    _take(server, browser, name)
        finally:
            browser.close()


if __name__ == "__main__":
    main()
