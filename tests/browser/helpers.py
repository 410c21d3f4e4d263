"""Assertions that several browser tests share."""

from tests.helpers.background import until


def expect_colours(page, selector, least):
    """Waits until a canvas shows so many different colours."""
    assert until(lambda: _colours(page, selector) >= least), f"{_colours(page, selector)} on {selector}"


def _colours(page, selector):
    return page.locator(selector).evaluate(
        """(canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const seen = new Set();
            for (let at = 0; at < data.length; at += 4) {
                if (data[at + 3] === 255) seen.add(data.slice(at, at + 3).join());
            }
            return seen.size;
        }"""
    )
