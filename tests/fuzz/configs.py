"""Mutated rules files, configurations and command lines: accepted as written, or an error that says what is wrong.

Anything else is a defect: an exception that is not the documented one, an unknown key that is accepted, rules that do
not survive being written and read again.
"""

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import yaml

import octavo
from octavo.cli import main
from octavo.rules import rules_from_json, rules_from_yaml, rules_to_json
from octavo.train import ConfigError, load
from tests.fuzz.runner import Case, DefectError, Fuzzer

RECIPES = [name for name in octavo.recipes() if name != "intmp"]  # a function of a table of bits
KEYS = ("steps", "quantization", "learning_rate", "model_name", "per_device_batch_size", "dataset_type", "run_name")
VALUES = (
    "", "1", "-1", "1e999", "nan", "true", "null", "[]", "{}", "int8", "fp8_full", "\x00", "é", "'", "a=b", "9" * 400,
)  # fmt: skip
PIECES = (
    "[", "]", "{", "}", ":", ",", "- ", '"', "\n", "&a ", "*a", "!!python/name:os ", "\t", "\\", "#", "[" * 3000,
)  # fmt: skip
COMMANDS = (
    "train", "plan", "recipes", "formats", "generate", "quantize", "compare", "report", "doctor", "verify", "serve",
)  # fmt: skip
CLEAN = ("--help", "--no-such-flag", "no/such/file", "int8", "", "-", "--", "steps=1", "\x00")


def draw(rng: np.random.Generator) -> Case:
    kind = str(rng.choice(["json", "yaml", "train", "command"]))
    if kind in ("json", "yaml"):
        rules = octavo.recipe(str(rng.choice(RECIPES)))
        text = rules_to_json(rules)
        text = text if kind == "json" else yaml.safe_dump(json.loads(text), sort_keys=False)
        for _ in range(rng.integers(0, 4)):
            text = mutated(rng, text)
        return {"kind": kind, "text": text}
    if kind == "train":
        pairs = [f"{rng.choice(KEYS)}={rng.choice(VALUES)}" for _ in range(rng.integers(1, 4))]
        return {"kind": kind, "args": [mutated(rng, p) if rng.random() < 0.3 else p for p in pairs]}
    args = [str(rng.choice(COMMANDS))] if rng.random() < 0.9 else [mutated(rng, str(rng.choice(COMMANDS)))]
    # Something unknown is always there, so that nothing long is started.
    return {"kind": kind, "args": [*args, *(str(a) for a in rng.choice(CLEAN, rng.integers(0, 2))), "--no-such-flag"]}


def mutated(rng: np.random.Generator, text: str) -> str:
    at, n = int(rng.integers(len(text) + 1)), int(rng.integers(1, 8))
    kind = rng.integers(4)
    if kind == 0:
        return text[:at] + text[at + n :]
    if kind == 1:
        return text[:at] + text[at : at + 40] + text[at:]
    if kind == 2:
        return text[:at] + str(rng.choice(PIECES)) + text[at:]
    return text[:at] + chr(int(rng.integers(32, 400))) + text[at + 1 :]


def check(case: Case) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of some regular expressions
        return _CHECKS[case["kind"]](case)


def check_rules(read: Callable[[str], object]) -> Callable[[Case], str]:
    def run(case: Case) -> str:
        try:
            rules = read(case["text"])
        except ValueError:
            return f"{case['kind']} raised"
        again = rules_from_json(rules_to_json(rules))
        if again != rules:
            raise DefectError(f"{rules} became {again} when written and read")
        return f"{case['kind']} accepted"

    return run


def check_train(case: Case) -> str:
    try:
        config, _ = load(case["args"], environ={})
    except ConfigError:
        return "train raised"
    unknown = [arg for arg in case["args"] if "=" in arg and not hasattr(config, arg.split("=")[0])]
    if unknown:
        raise DefectError(f"{unknown} was accepted")
    return "train accepted"


def check_command(case: Case) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(case["args"])
        except SystemExit as stop:
            code = stop.code
    text = output.getvalue()
    if "Traceback" in text:
        raise DefectError(f"a traceback was printed:\n{text[-2000:]}")
    if code not in (0, None) and not text.strip() and not isinstance(code, str):
        raise DefectError(f"it ended with {code} and said nothing")
    return "command ended"


_CHECKS = {
    "json": check_rules(rules_from_json),
    "yaml": check_rules(rules_from_yaml),
    "train": check_train,
    "command": check_command,
}


def shrink(case: Case) -> Iterator[Case]:
    if "text" in case:
        lines = case["text"].splitlines(keepends=True)
        for i in range(len(lines)):
            yield case | {"text": "".join(lines[:i] + lines[i + 1 :])}
        return
    for i in range(len(case["args"])):
        yield case | {"args": case["args"][:i] + case["args"][i + 1 :]}


CONFIGS = Fuzzer("configs", draw, check, shrink)
