"""Assertions, measurements and parameters that several browser tests share."""

import os
import time
from pathlib import Path

import pytest

from tests.helpers.background import until

expect = pytest.importorskip("playwright.sync_api").expect

WIDE = {"width": 1280, "height": 900}
"""The size of a page at first."""
SCHEMES = ["light", pytest.param("dark", marks=pytest.mark.slow)]
"""The colours that a system asks for; that pages are readable in dark ones, test_everywhere shows each time."""


def expect_colours(page, selector, least):
    """Waits until a canvas shows so many different colours."""
    assert until(lambda: len(_colours(page, selector)) >= least), f"{len(_colours(page, selector))} on {selector}"


def pixels_of(page, selector, name):
    """Returns how many pixels of a canvas have, about, a colour that the style sheet names."""
    script = """(name) => {
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.color = `var(${name})`;
        const found = getComputedStyle(probe).color.match(/[0-9.]+/g).map(Number);
        probe.remove();
        return found;
    }"""
    wanted = page.evaluate(script, name)[:3]
    near = lambda rgb: all(abs(int(part) - own) < 12 for part, own in zip(rgb.split(","), wanted, strict=True))  # noqa: E731
    return sum(count for rgb, count in _colours(page, selector).items() if near(rgb))


def _colours(page, selector):
    """Returns the colours of a canvas, as "r,g,b", and how many opaque pixels have each."""
    return page.locator(selector).evaluate(
        """(canvas) => {
            // from a copy: Chromium warns of a canvas on the GPU that is read several times
            const { width, height } = canvas;
            const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
            copy.drawImage(canvas, 0, 0);
            const { data } = copy.getImageData(0, 0, width, height);
            const seen = {};
            for (let at = 0; at < data.length; at += 4) {
                const rgb = data.slice(at, at + 3).join();
                if (data[at + 3] === 255) seen[rgb] = (seen[rgb] ?? 0) + 1;
            }
            return seen;
        }"""
    )


def expect_phone_width(page):
    """Nothing is wider than a phone, at the latest when the charts have followed a change of the window's width."""
    script = "document.documentElement.scrollWidth"
    assert until(lambda: page.evaluate(script) <= 390), f"{page.url} is {page.evaluate(script)} pixels wide"


def copied(button, click=None):
    """The text that a button copies, once the button has said so: it says that for a moment, which a test may miss.

    Args:
        click: is called with the button in place of its own click.
    """
    button.evaluate(
        """() => {
            window.said = [];
            const note = (changes) => window.said.push(...changes.map((change) => change.target.textContent));
            new MutationObserver(note).observe(document.body, { childList: true, subtree: true });
        }"""
    )
    (click or type(button).click)(button)
    assert until(lambda: "Copied" in button.page.evaluate("window.said")), button
    return button.page.evaluate("navigator.clipboard.readText()")


class OwnTime:
    """Seconds since it was made that do not depend on what else the machine does.

    The larger of two: the time of the processors that this process and its children took (the server runs in it, the
    browser below it), and the time on the clock less the sum of what their threads waited for a processor. So on an
    idle machine it is the time on the clock, with timers, requests and the disk; on a busy one, where several threads
    wait at once, it is that of the processors.
    """

    def __init__(self):
        self._began, self._threads = time.monotonic(), _threads()

    def seconds(self):
        ran, waited = 0, 0
        for thread, (ran_ns, waited_ns) in _threads().items():
            before = self._threads.get(thread, (0, 0))
            ran, waited = ran + ran_ns - before[0], waited + waited_ns - before[1]
        return max(ran / 1e9, time.monotonic() - self._began - waited / 1e9)


def _threads():
    """Returns how many nanoseconds each thread of this process and of its children ran, and waited for a processor."""
    below = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has ended
        below.setdefault(parent, []).append(int(stat.parent.name))
    processes, found = [os.getpid()], {}
    for process in processes:
        processes += below.get(process, [])
        for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
            try:
                found[path] = tuple(map(int, path.read_text().split()[:2]))
            except OSError:
                continue
    return found


def at_the_end(chart, text, shown):
    """Goes to the end of a chart by its key, again where the chart was drawn anew meanwhile, until a text is shown."""
    deadline = time.monotonic() + 60
    while shown not in (text.text_content() or "") and time.monotonic() < deadline:
        chart.focus()
        chart.press("End")
        chart.page.wait_for_timeout(100)
    expect(text).to_contain_text(shown)
