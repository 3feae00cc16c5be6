"""The page can be read in light and in dark: texts and lines stand out from the paper."""

import re
from importlib import resources

import pytest

STYLE = resources.files("octavo.report").joinpath("style.css").read_text("utf8")
THEMES = [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)]


def luminance(color):
    """Of a colour, as WCAG defines it."""
    digits = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark", "print"])
def test_contrast(theme):
    paper = luminance(theme["paper"])
    for name in ("ink", "muted", *(f"c{i}" for i in range(8))):
        low, high = sorted([paper, luminance(theme[name])])
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{name} is hard to read"


def test_every_colour_is_defined():
    assert len(THEMES) == 3
    assert set(re.findall(r"var\(--(\w+)", STYLE)) - {"c"} <= set(THEMES[0])
