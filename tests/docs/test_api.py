"""The API reference has every public name."""

import re
from pathlib import Path

import octavo
from octavo import optim

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_every_public_name_is_on_the_page_once():
    assert sorted(re.findall(r"^::: octavo\.(\w+)$", PAGE, re.MULTILINE)) == sorted(octavo.__all__)


def test_every_optimizer_is_on_the_page_once():
    public = [name for name in optim.__all__ if name != "MOMENTS"]
    assert sorted(re.findall(r"^::: octavo\.optim\.(\w+)$", PAGE, re.MULTILINE)) == sorted(public)
    assert [name for name in public if not (getattr(optim, name).__doc__ or "").strip()] == []


def test_every_public_name_has_a_docstring():
    assert [name for name in octavo.__all__ if not (getattr(octavo, name).__doc__ or "").strip()] == []
