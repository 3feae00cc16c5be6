"""The page can be read in light and in dark: texts and lines stand out from the paper."""

import re
from importlib import resources

import pytest

STYLE = resources.files("octavo.report").joinpath("templates", "style.css").read_text("utf8")
THEMES = [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)]


def channels(color):
    digits = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
    return [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]


def luminance(color):
    """Of a colour, as WCAG defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(color)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark", "print"])
def test_contrast(theme):
    paper = luminance(theme["paper"])
    for name in ("ink", "muted", "focus", *(f"c{i}" for i in range(8))):
        low, high = sorted([paper, luminance(theme[name])])
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{name} is hard to read"


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark", "print"])
@pytest.mark.parametrize("strength", [0.0, 0.3, 0.6, 0.9])
def test_numbers_on_the_colours_of_a_heat_map(theme, strength):
    ink = luminance(theme["ink"])
    pairs = zip(channels(theme["heat"]), channels(theme["paper"]), strict=True)
    mixed = [round(255 * (strength * a + (1 - strength) * b)) for a, b in pairs]
    low, high = sorted([ink, luminance("#" + "".join(f"{c:02x}" for c in mixed))])
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_every_colour_is_defined():
    assert len(THEMES) == 3
    assert set(re.findall(r"var\(--(\w+)", STYLE)) - {"c", "h"} <= set(THEMES[0])
