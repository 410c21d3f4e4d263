"""Draws values over steps as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treeckpt._core.html import Html, el

WIDTH = 1000


def _text(x: float, y: float, text: str, anchor: str = "start") -> Html:
    return el("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def line_chart(
    steps: Sequence[int], series: Sequence[tuple[str, Sequence[float | None]]], text: Callable[[float], str]
) -> Html:
    """Draws values over steps; the vertical axis begins at zero.

    Args:
        text: formats a value.
    """
    height, left, bottom = 170, 80, 22
    most = max((v for _, values in series for v in values if v is not None), default=0) or 1
    span = max(steps[-1] - steps[0], 1)
    shapes = [_text(left - 8, 20, text(most), anchor="end"), _text(left - 8, height - bottom, "0", anchor="end")]
    for colour, (name, values) in enumerate(series):
        path: list[str] = []
        dots: list[Html] = []
        for step, value in zip(steps, values, strict=True):
            if value is not None:
                x = f"{left + (step - steps[0]) / span * (WIDTH - left - 20):.1f}"
                y = f"{(height - bottom) - value / most * (height - 40):.1f}"
                path.append(f"{x} {y}")
                title = el("title", f"step {step}: {name} {text(value)}")
                dots.append(el("circle", title, cx=x, cy=y, r="3.5", class_=f"f{colour}"))
        shapes += [el("path", d="M" + "L".join(path) if path else "", class_=f"line l{colour}"), *dots]
    shapes += [_text(left, height - 4, f"step {steps[0]}"), _text(WIDTH - 20, height - 4, f"{steps[-1]}", anchor="end")]
    label = ", ".join(name for name, _ in series) + " over steps"
    return el("svg", *shapes, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label)
