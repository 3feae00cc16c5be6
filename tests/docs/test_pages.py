"""Tables in the documentation are those of the registries, and the commands in it are accepted."""

import json
import re
import shlex
from pathlib import Path

import pytest

import octavo
from octavo import Quantizer, formats
from octavo.numerics import BlockFormat
from octavo.rules import get_recipe
from octavo.train.config import Config, load
from octavo.train.quantization import training_rules

DOCS = Path(__file__).parents[2] / "docs"
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TRAIN = re.compile(r"(?:\.venv/bin/)?(?:octavo train|python -m octavo\.train)\b(.*)")
COMPARE = re.compile(r"(?:\.venv/bin/)?octavo compare\b(.*)")
OF_COMPARE = ("seeds", "eval_points", "fresh")


def table(mark, page="numbers.md"):
    """The rows between `<!-- mark -->` and `<!-- end -->`, without the two of the head."""
    found = re.search(f"<!-- {mark} -->\n(.*?)<!-- end -->", (DOCS / page).read_text(), re.DOTALL)
    assert found
    return found[1].splitlines()[2:]


def format_row(fmt):
    cells = [
        f"`{fmt.name}`",
        fmt.storage.name,
        fmt.bits,
        f"{fmt.bound:.9g}",
        f"{fmt.smallest:.9g}",
        f"{fmt.largest:.9g}",
        fmt.carrier.name,
        "yes" if fmt.has_nan else "no",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def block_row(fmt):
    bits = Quantizer(fmt).bits_per_value((256, 4096))
    outer = "float32" if fmt.outer else "none"
    cells = [f"`{fmt.name}`", fmt.tile, fmt.scale_dtype, fmt.scale_rounding, outer, f"{bits:.4g}"]
    return f"| {' | '.join(map(str, cells))} |"


def test_the_table_of_formats_is_complete_and_true():
    assert table("formats") == [format_row(fmt) for fmt in formats().values()]


def test_the_table_of_block_formats_is_complete_and_true():
    assert table("blocks") == [block_row(fmt) for fmt in formats().values() if isinstance(fmt, BlockFormat)]


def commands(kind):
    """The arguments of the commands of a kind in all pages."""
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        for block in SHELL.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                if found := kind.fullmatch(line):
                    yield pytest.param(shlex.split(found[1], comments=True), id=f"{page.name}: {line}")


def recipe_row(config):
    """A value of `quantization`, its summary, and whether the rules differ between the front ends."""
    name = config.quantization
    one, other = (training_rules(config.replace(use_qwix_quantization=qwix)) for qwix in (True, False))
    return f"| `{name}` | {get_recipe(name).summary} |{'' if one == other else ' yes'} |"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A directory with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bits.json").write_text(json.dumps({"__default__": {"w_bits": 8, "a_bits": 8}}))
    (tmp_path / "rules.yml").write_text("- weight_qtype: int8\n")
    (tmp_path / "runs" / "float" / "checkpoints").mkdir(parents=True)
    for file in ("SmolLM2-135M.gguf", "SmolLM2-135M-Instruct.gguf", "talks.jsonl"):
        (tmp_path / file).touch()
    for directory in ("notes", "stories", "stories15M"):
        (tmp_path / directory).mkdir()


@pytest.mark.usefixtures("files")
def test_the_table_of_recipes_is_complete_and_true():
    paths = {"intmp": "bits.json"}
    config = Config(quantization_local_shard_count=1)
    configs = [config.replace(quantization=n, quant_cfg_path=paths.get(n, "")) for n in octavo.recipes(aliases=True)]
    assert table("recipes", "train.md") == [recipe_row(config) for config in configs]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", list(commands(TRAIN)))
def test_commands_to_train_are_accepted(words):
    config, sources = load(words, environ={})
    training_rules(config)
    assert not [note for note in sources.notes if "has no effect" in note]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", list(commands(COMPARE)))
def test_commands_to_compare_are_accepted(words):
    given = dict(word.split("=", 1) for word in words)
    names = given.pop("quantization").split(",")
    rest = [f"{key}={value}" for key, value in given.items() if key not in OF_COMPARE]
    for name in names:
        assert training_rules(load([*rest, f"quantization={name}"], environ={}).config)
