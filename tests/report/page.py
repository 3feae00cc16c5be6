"""Reads a page as a browser would, strictly: every tag closed, every drawing well-formed."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

SIGNS = str.maketrans({"\N{MULTIPLICATION SIGN}": "x", "\N{EN DASH}": "-", "\N{MINUS SIGN}": "-"})
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """The text and the tags of a page; fails on tags that do not match."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.source, self.tags, self.open, self.words = source, [], [], []
        self.feed(source)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        self.text = " ".join(" ".join(self.words).split()).translate(SIGNS)
        drawn = [ElementTree.fromstring(s) for s in re.findall(r"<svg.*?</svg>", source, re.DOTALL)]
        self.narrow = [svg for svg in drawn if svg.get("class") == "narrow"]
        self.svgs = [svg for svg in drawn if svg not in self.narrow]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def read(path):
    """A page that was written, checked."""
    page = Page(path.read_text("utf8"))
    check(page)
    return page


def check(page):
    """What holds of every page: it loads nothing, is small, and can be read without seeing it."""
    assert len(page.source.encode()) < 2_000_000
    loading = {"src", "action", "data", "srcset"}
    assert not [attrs for _, attrs in page.tags if loading & attrs.keys()]
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    assert [
        attrs for tag, attrs in page.tags if "href" in attrs and (tag, attrs["href"][1:] in ids) != ("a", True)
    ] == []
    outside = page.source.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://|url\(|@import", outside)
    assert page.all("html") == [{"lang": "en"}]
    assert any("viewport" in attrs.values() for attrs in page.all("meta"))
    assert len(page.all("h1")) == len(page.all("title")) - len(page.svgs + page.narrow) == 1
    assert len(page.all("caption")) == len(page.all("table"))
    assert len(page.all("figcaption")) == len(page.all("figure"))
    assert all("scope" in attrs for attrs in page.all("th"))
    assert all(attrs == {"type": "button"} for attrs in page.all("button"))
    name = "{http://www.w3.org/2000/svg}"
    for svg in page.svgs + page.narrow:
        assert svg.get("role") == "img"
        assert svg.find(f"{name}title").text
        assert svg.find(f"{name}desc").text
        for path in svg.iter(f"{name}path"):
            assert re.fullmatch(r"(M-?[\d.]+ -?[\d.]+(L-?[\d.]+ -?[\d.]+|h\.1|Z)*)+", path.get("d")), path.get("d")
