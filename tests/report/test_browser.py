"""The pages in a real browser: they open in silence, sort, are drawn, fit a phone, turn dark and print."""

import itertools
import json
import shutil

import pytest

from octavo.report import render, render_together
from octavo.report.record import COMPARISON
from tests.report import samples

pytestmark = [pytest.mark.slow, pytest.mark.browser]
PAGES = ("training", "comparison", "conversion", "evaluation", "together")

# Of each text: its contrast to what is behind it, as WCAG defines it.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return Array.from(canvas.getImageData(0, 0, 1, 1).data);
  };
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = rgba(getComputedStyle(e).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const out = [];
  const texts = "h1,h2,p,li,a,dt,dd,th,td,figcaption,summary,caption,code,button,text,footer";
  for (const e of document.querySelectorAll(texts)) {
    if (!e.textContent.trim() || !e.checkVisibility()) continue;
    const style = getComputedStyle(e), fill = e.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [a, b] = [light(rgba(fill)), light(behind(e))].sort((x, y) => y - x);
    out.push([(a + 0.05) / (b + 0.05), e.tagName, e.textContent.slice(0, 40)]);
  }
  return out;
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [samples.train(folder / "float", recipe="", scale=1.0), samples.train(folder / "int8")]
    runs += [samples.convert(folder / "int4"), samples.evaluate(folder / "low"), samples.evaluate(folder / "lower")]
    (folder / "three").mkdir()
    (folder / "three" / COMPARISON).write_text(json.dumps(samples.comparison()))
    from tests.report.test_page import planned

    planned(folder / "int8")
    planned(samples.train(folder / "long"), long=True)
    found = {
        "training": render(folder / "int8"),
        "long plan": render(folder / "long"),
        "comparison": render(folder / "three"),
        "conversion": render(folder / "int4"),
        "evaluation": render(folder / "low"),
        "together": render_together(runs, folder / "together.html"),
    }
    return {name: path.resolve().as_uri() for name, path in found.items()}


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium has no sandbox for root, as whom CI runs it; the pages are our own files.
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser, pages):
    """Opens a page, and at the end asserts that it was silent and loaded nothing but itself."""
    contexts, heard, asked = [], [], []

    def open_page(name, **options):
        contexts.append(browser.new_context(**({"viewport": {"width": 1100, "height": 800}} | options)))
        page = contexts[-1].new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(pages[name])
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert heard == []
    assert set(asked) <= set(pages.values()), "a page requested another file"
    assert asked


@pytest.mark.parametrize("name", PAGES)
def test_opens_and_draws(visit, name):
    page = visit(name)
    drawings = page.locator("svg:visible")
    assert drawings.count() == page.locator("svg").count() - page.locator("svg.narrow").count() > 0
    for i in range(drawings.count()):
        box = drawings.nth(i).bounding_box()
        assert box["width"] > 200
        assert box["height"] > 60
    empty = "els => els.filter(e => !(e.getBBox().width + e.getBBox().height > 0)).length"
    assert page.locator("svg:visible path").evaluate_all(empty) == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", PAGES)
def test_can_be_read_without_seeing_it(visit, name):
    page = visit(name)
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("contentinfo").count() == 1
    levels = page.locator("h1,h2,h3,h4").evaluate_all("els => els.map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(b <= a + 1 and b > 1 for a, b in itertools.pairwise(levels))
    drawings = page.get_by_role("img")
    assert drawings.count() == page.locator("svg:visible").count()
    assert "- img\n" not in page.locator("main").aria_snapshot(), "a drawing has no name"
    hidden = page.locator("figure:not(.small) details table").count()
    assert name == "conversion" or hidden > 0, "charts have their numbers in tables"
    assert page.get_by_role("region").count() >= 1


@pytest.mark.parametrize("name", PAGES)
def test_fits_a_phone(visit, name):
    page = visit(name, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for box in page.locator("svg:visible").evaluate_all("els => els.map(e => e.getBoundingClientRect().toJSON())"):
        assert box["left"] >= 0
        assert box["right"] <= 360
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, "an opened table widens the page"
    sizes = page.locator("svg:visible text").evaluate_all("els => els.map(e => e.getBoundingClientRect().height)")
    assert min(sizes) > 10, "a label too small to read"


@pytest.mark.parametrize("width", [1280, 1440])
def test_a_plan_of_long_rows_is_shown_whole(visit, width):
    page = visit("long plan", viewport={"width": width, "height": 900})
    table = page.get_by_role("table", name="matmuls are quantized")
    assert table.get_by_role("columnheader").count() == 12
    boxes = table.locator("th, td").evaluate_all("els => els.map(e => e.getBoundingClientRect().toJSON())")
    assert min(box["left"] for box in boxes) >= 0
    assert max(box["right"] for box in boxes) <= width
    assert table.evaluate("e => e.scrollWidth - e.parentElement.clientWidth") <= 0, "a part has to be scrolled to"
    cut = "els => els.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"
    assert table.locator("th, td").evaluate_all(cut) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(visit, name, scheme):
    found = visit(name, color_scheme=scheme).evaluate(CONTRASTS)
    assert len(found) > 30
    assert [entry for entry in found if entry[0] < 4.5] == []


def test_dark_is_dark(visit):
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit("training", color_scheme=scheme).evaluate(paper) for scheme in ("light", "dark"))
    assert (light, dark) == ("rgb(252, 252, 250)", "rgb(22, 24, 27)")


def column(table, number):
    return table.locator(f"tbody tr > :nth-child({number})").all_inner_texts()


def test_table_sorts_by_click(visit):
    page = visit("conversion")
    table = page.get_by_role("table", name="parameters are quantized")
    before = column(table, 1)
    head = table.get_by_role("columnheader", name="values")
    head.get_by_role("button").click()
    values = [int(text.replace(",", "")) for text in column(table, 3)]
    assert values == sorted(values)
    assert head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").click()
    assert [int(text.replace(",", "")) for text in column(table, 3)] == sorted(values, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    assert sorted(before) == sorted(column(table, 1)), "rows are moved, none is lost"
    ratio = table.get_by_role("columnheader", name="SQNR")
    ratio.get_by_role("button").click()
    known = [float(text.split()[0]) for text in column(table, 9) if "dB" in text]
    assert known == sorted(known)
    assert head.get_attribute("aria-sort") is None, "one column sorts at a time"


def test_table_sorts_by_keyboard(visit):
    page = visit("training")
    table = page.get_by_role("table", name="matmuls are quantized")
    button = table.get_by_role("button", name="matmul")
    button.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert button.evaluate("e => e === document.activeElement")
    assert button.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    ascending = column(table, 1)
    assert ascending == sorted(ascending)
    page.keyboard.press("Space")
    assert column(table, 1) == sorted(ascending, reverse=True)


@pytest.mark.parametrize("name", ["comparison", "conversion"])
def test_worst_tensors_are_drawn_over_the_values_of_their_format(visit, name):
    page = visit(name)
    part = page.get_by_role("region", name="Worst tensors").first
    drawings = part.get_by_role("img")
    assert drawings.count() >= 2
    for i in range(drawings.count()):
        bars, marks = (drawings.nth(i).locator(f"path.{kind}").bounding_box() for kind in ("bars", "marks"))
        box = drawings.nth(i).bounding_box()
        assert bars["height"] > 0.3 * box["height"]
        assert marks["y"] >= bars["y"] + bars["height"], "the grid is below the bars"
        assert marks["width"] > 0.6 * box["width"]
    part.get_by_text("The same as a table").click()
    assert part.get_by_role("table").is_visible()


def test_links_lead_to_their_sections(visit):
    page = visit("training")
    links = page.get_by_role("navigation").get_by_role("link")
    assert links.count() >= 6
    links.last.click()
    assert page.evaluate("scrollY") > 0


@pytest.mark.parametrize("name", PAGES)
def test_prints(visit, name):
    page = visit(name, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert page.locator("svg:visible").count() > 0
    printed = page.pdf(format="A4", print_background=False)
    assert printed.startswith(b"%PDF-")
    assert len(printed) > 10_000
