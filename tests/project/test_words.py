"""The words of the field: names, docstrings, comments and error texts do not use those that they replaced."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

TEXT = {
    r"lies|laid (?:out|down|beside)|settled|beside": "sharded along, replicated, next to",
    r"brought|(?:adds?|added|adding) up": "all-gathered, reduced, summed",
    r"what (?:was|is|were) lost": "error feedback",
    r"told|watched": "telemetry, measured, given",
    r"(?:goes|went|go) on|begins? anew": "resumes, continues",
    r"(?<!in )(?<!of-)turns?(?! (?:it |them )?(?:on|off|into|around)\b)": "step, iteration",
    r"refus(?:e|es|ed|al|als|ing)": "raise, unsupported, reason",
    r"whole or not there": "atomic",
    r"to the bit": "bit-exact, bit for bit",
    r"derivatives? of (?:its|their) own": "custom_vjp function, opaque call",
}
"""Words not to use anywhere, as regular expressions, and those to use instead."""
PARTS_OF_NAMES = {"told", "laid", "brought", "settled", "beside", "ways", "refuse", "refusal", "anew", "watched", "how"}
"""Words that are not part of a name that a module defines."""
OPTIONS = {"how", "where"}
"""Names that no argument has: it is named after its type."""

_CONTRIB = "src/octavo/compat/qwix/contrib"
ALLOWED = {
    # Arguments and fields of Qwix's functions.
    **{f"{_CONTRIB}/{name}.py": {"how"} for name in ("awq_core", "calibration", "gptq_core", "padded_ptq")},
    "src/octavo/frameworks/params.py": {"how"},  # the field of Qwix's WithAux
    "src/octavo/ptq/statistics.py": {"where"},
}
"""Words by file that are not replaced yet, or have their common meaning."""

_TEXT = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), instead) for words, instead in TEXT.items()]
_ANY = re.compile(rf"\b(?:{'|'.join(TEXT)})\b", re.IGNORECASE)
_NAME = re.compile(rf"_?(?:{'|'.join(PARTS_OF_NAMES | OPTIONS)})(?:_|\s*[:=,()])", re.IGNORECASE)


def wrong_text(source: str) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        if _ANY.search(line):
            for words, instead in _TEXT:
                yield from ((number, match[0].lower(), instead) for match in words.finditer(line))


def wrong_names(source: str) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                bad = {word.lower() for word in re.findall("[A-Z]?[a-z]+", name)} & PARTS_OF_NAMES
            case ast.arg(arg=name):
                bad = ({word.lower() for word in re.findall("[A-Z]?[a-z]+", name)} & PARTS_OF_NAMES) | (
                    {name} & OPTIONS
                )
            case _:
                continue
        yield from ((node.lineno, word, "the name of its type, or a verb") for word in sorted(bad))


def test_words_of_the_field():
    wrong = []
    for path in sorted([*ROOT.glob("src/octavo/**/*.py"), *ROOT.glob("docs/**/*.md")]):
        file, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf8")
        names = path.suffix == ".py" and _NAME.search(source) is not None  # parsing takes the most time
        found = [*wrong_text(source), *(wrong_names(source) if names else ())]
        allowed = ALLOWED.get(file, ())
        wrong += [f"{file}:{line}: {word!r}; say {instead}" for line, word, instead in found if word not in allowed]
    assert not wrong, "\n" + "\n".join(wrong)
