"""Every example in a docstring, in the README and in docs/ runs, and prints what it says it prints."""

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import octavo
from octavo.calibration import registry as calibrations
from octavo.numerics import registry as formats
from octavo.rules import registry as recipes

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Pages that train by Optax, which relies on JAX's own promotion.
STANDARD_PROMOTION = ("docs/train.md",)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules():
    for module in pkgutil.walk_packages(octavo.__path__, "octavo."):
        # The library of CPU kernels lies among the modules, but is none.
        if not module.name.endswith("__main__") and "-" not in module.name:
            yield module.name
    yield "octavo"


@pytest.fixture(autouse=True)
def _registries(monkeypatch):
    """What an example registers is gone after it."""
    for module, name in (
        (formats, "_formats"),
        (formats, "_aliases"),
        (calibrations, "_makers"),
        (recipes, "_recipes"),
    ):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))


def run(text, names, where, line):
    """Run the examples in a text, sharing `names`."""
    test = doctest.DocTestParser().get_doctest(text, names, where, where, line)
    runner, printed = doctest.DocTestRunner(optionflags=FLAGS), []
    runner.run(test, out=printed.append, clear_globs=False)
    assert not runner.failures, "".join(printed)
    names.update(test.globs)


@pytest.mark.parametrize("name", list(modules()))
@pytest.mark.sampled(8)
def test_docstrings(name):
    # Read from the source: doctest itself overlooks functions that a decorator has wrapped.
    module = importlib.import_module(name)
    source = Path(module.__file__)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(source.read_text())):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text and ">>>" in text:
            run(text, dict(vars(module)), f"{name}.{getattr(node, 'name', '')}", getattr(node, "lineno", 1))


def marked(page):
    return pytest.param(page, marks=pytest.mark.standard_promotion) if page in STANDARD_PROMOTION else page


@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
@pytest.mark.sampled(9)
def test_pages(page):
    text = (ROOT / page).read_text()
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        if ">>>" in block[1]:
            run(block[1], names, page, line)
        else:
            exec(compile("\n" * line + block[1], page, "exec"), names)
    assert "```python" not in BLOCK.sub("", text), "a block of code that is not closed"
