"""Every example in a docstring, in the README and in docs/ runs, and prints what it says it prints."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "octavo"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Pages that train by Optax, which relies on JAX's own promotion.
STANDARD_PROMOTION = ("docs/optimizers.md", "docs/train.md")
pytestmark = pytest.mark.usefixtures("registries")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules():
    """The modules with examples, by package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if ">>>" in path.read_text() and path.name != "__main__.py":
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            found.setdefault(".".join(name.split(".")[:2]), []).append((name, path))
    return found


def pages():
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if "```python" in path.read_text():
            name = str(path.relative_to(ROOT))
            yield pytest.param(name, marks=[pytest.mark.standard_promotion] * (name in STANDARD_PROMOTION))


def run(text, names, where, line):
    """Run the examples in a text, sharing `names`."""
    test = doctest.DocTestParser().get_doctest(text, names, where, where, line)
    runner, printed = doctest.DocTestRunner(optionflags=FLAGS), []
    runner.run(test, out=printed.append, clear_globs=False)
    assert not runner.failures, "".join(printed)
    names.update(test.globs)


@pytest.mark.parametrize("package", list(modules()))
def test_docstrings(package):
    for name, path in modules()[package]:
        module = importlib.import_module(name)
        # Read from the source: doctest itself overlooks functions that a decorator has wrapped.
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else None
            if text and ">>>" in text:
                run(text, dict(vars(module)), f"{name}.{getattr(node, 'name', '')}", getattr(node, "lineno", 1))


@pytest.mark.parametrize("page", list(pages()))
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
