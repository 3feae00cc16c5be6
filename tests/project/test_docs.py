"""The documentation builds without warnings and loads nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"""(?:\]\(|src=")([^)"\s]+)[)"]""")
LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?(https?:)?//[^"'\s>]+""")


def anchors(page):
    """The names that GitHub and mkdocs give to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


# mkdocs checks the pages of docs/; these lie outside of it.
@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_pages_beside_the_documentation_lead_somewhere(page):
    for link in LINK.findall((ROOT / page).read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = ROOT / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_has_a_place_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f" {page.name}\n" not in navigation]
    assert not missing


@pytest.mark.slow
def test_the_documentation_builds_and_needs_no_network(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert pages
    for page in pages:
        assert not LOADED.search(page.read_text()), page
