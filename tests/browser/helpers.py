"""Assertions and parameters that several browser tests share."""

import pytest

from tests.helpers.background import until

WIDE = {"width": 1280, "height": 900}
"""The size of a page at first."""
SCHEMES = ["light", pytest.param("dark", marks=pytest.mark.slow)]
"""The colours that a system asks for; that pages are readable in dark ones, test_everywhere shows each time."""


def expect_colours(page, selector, least):
    """Waits until a canvas shows so many different colours."""
    assert until(lambda: _colours(page, selector) >= least), f"{_colours(page, selector)} on {selector}"


def _colours(page, selector):
    return page.locator(selector).evaluate(
        """(canvas) => {
            // from a copy: Chromium warns of a canvas on the GPU that is read several times
            const { width, height } = canvas;
            const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
            copy.drawImage(canvas, 0, 0);
            const { data } = copy.getImageData(0, 0, width, height);
            const seen = new Set();
            for (let at = 0; at < data.length; at += 4) {
                if (data[at + 3] === 255) seen.add(data.slice(at, at + 3).join());
            }
            return seen.size;
        }"""
    )


def expect_phone_width(page):
    """Nothing is wider than a phone, at the latest when the charts have followed a change of the window's width."""
    script = "document.documentElement.scrollWidth"
    assert until(lambda: page.evaluate(script) <= 390), f"{page.url} is {page.evaluate(script)} pixels wide"
