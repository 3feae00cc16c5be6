"""Where the values of a configuration come from, and which source is stronger.

From weak to strong: the defaults, YAML files (`base_config` first), the environment, `key=value`. The file of the model
stands just below the file that names the model; if the environment or the command line names it, above all files. So
`model_name=10m` on the command line overrules a file, and what stands beside `model_name: 10m` in a file counts.
"""

import dataclasses
import datetime
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.train import files, maxtext
from octavo.train.config import Config
from octavo.train.conflicts import METHODS, notes, validate
from octavo.train.existing import missing_files
from octavo.train.files import Layer, Text
from octavo.train.keys import ConfigError, Problem, parse, shown, unknown_key

_PREFIXES = ("OCTAVO_", "M_")
_COMMAND, _ENVIRONMENT = "command line", "environment"
_FIELDS = {field.name: field for field in dataclasses.fields(Config)}


class Sources(Mapping[str, str]):
    """Where each key that is set anywhere was set last, such as `mine.yml:3`; and what else is worth saying."""

    def __init__(self, places: Mapping[str, str], notes: Sequence[str] = ()):
        self._places, self.notes = dict(places), tuple(notes)

    def __getitem__(self, key: str) -> str:
        return self._places[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"Sources({self._places!r}, {self.notes!r})"


class Loaded(NamedTuple):
    """A configuration, and where it came from."""

    config: Config
    sources: Sources


def load(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """The configuration of a command line: at most one YAML file, and any count of `key=value`.

    Raises a `ConfigError` that lists everything that is wrong.

    >>> config, sources = load(["configs/base.yml", "steps=50", "learning_rate=3e-4"], environ={})
    >>> config.steps, config.learning_rate, sources["steps"]
    (50, 0.0003, 'command line')
    """
    reading = _Reading()
    layers = reading.layers(list(argv), os.environ if environ is None else environ)
    values, places = reading.merge(layers)
    return reading.resolve(values, places)


class _Reading:
    """One go at a command line: problems and notes gather while the sources are read."""

    def __init__(self):
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def layers(self, argv: list[str], environ: Mapping[str, str]) -> list[Layer]:
        """All sources, weakest first."""
        paths, command = self._arguments(argv)
        environment = self._environment(environ)
        for key in sorted(set(command.values) & set(environment.values)):
            text = f"{key} is set by the command line and by {environment.places[key]}: unset one of them"
            self.problems.append(Problem((key,), text))
        try:
            read = [layer for path in paths for layer in files.chain(path)]
        except ConfigError as error:
            self.problems += error.problems
            read = []
        return self._with_model([*read, environment, command], Path(paths[0]).parent if paths else Path())

    def merge(self, layers: list[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
        """The strongest value of each key, and where it is set."""
        values: dict[str, Any] = {}
        places: dict[str, str] = {}
        for layer in layers:
            for key, text in layer.values.items():
                if key in _FIELDS:
                    self._tell_overruled(layer, layers, key, text, values)
                    self._set(values, key, text, layer.places[key])
                    places[key] = layer.places[key]
                else:
                    self._unknown(key, layer.places[key])
        return values, places

    def resolve(self, values: dict[str, Any], places: dict[str, str]) -> Loaded:
        """The configuration, if nothing is wrong."""
        common = values.get("quantization_calibration_method")
        for key in METHODS:
            # Config knows values only. That "absmax" was asked for, and is not the default, is known here.
            if common and common != values.get(key, common) == "absmax" and places[key] in (_COMMAND, _ENVIRONMENT):
                text = f"quantization_calibration_method={common} and {key}=absmax: set either it or the three methods"
                self.problems.append(Problem((), text))
        given = {name: values.get(name, field.default) for name, field in _FIELDS.items()}
        checked, problems = validate(tuple(_FIELDS.values()), given)
        unread = {key for problem in self.problems for key in problem.keys}
        self.problems += [_placed(problem, places) for problem in problems if not unread & set(problem.keys)]
        if not self.problems:
            self.problems += [_placed(problem, places) for problem in missing_files(checked)]
        if self.problems:
            raise ConfigError(self.problems)
        if not checked["run_name"]:
            checked["run_name"], places["run_name"] = _fresh_name(checked), "from model, recipe and time"
        return Loaded(Config(**checked), Sources(places, [*self.notes, *notes(checked)]))

    def _arguments(self, argv: list[str]) -> tuple[list[str], Layer]:
        paths, values = [], {}
        for word in argv:
            key, equals, text = word.partition("=")
            if equals:
                if key != key.lstrip("-"):
                    self.problems.append(Problem((), f"{word}: write {word.lstrip('-')}, without dashes"))
                values[key.strip().lstrip("-")] = text
            elif word.endswith((".yml", ".yaml")):
                paths.append(word)
            else:
                self.problems.append(Problem((), f"{word}: neither a .yml file nor key=value"))
        if len(paths) > 1:
            text = f"{' and '.join(paths)}: one file is read; let it inherit from others by base_config"
            self.problems.append(Problem((), text))
        if "base_config" in values:
            self.problems.append(Problem((), "base_config is for files; give the file itself as the first argument"))
            del values["base_config"]
        return paths[:1], Layer(_COMMAND, values, dict.fromkeys(values, _COMMAND), _COMMAND)

    def _environment(self, environ: Mapping[str, str]) -> Layer:
        values: dict[str, Text] = {}
        places: dict[str, str] = {}
        for prefix in _PREFIXES:
            for variable, text in environ.items():
                key = variable.removeprefix(prefix).lower()
                if not variable.startswith(prefix):
                    continue
                if key in values:
                    self.problems.append(Problem((key,), f"{places[key]} and {variable} are both set: unset one"))
                elif key in _FIELDS or key in maxtext.NO_EFFECT or _misspelt(key):
                    values[key], places[key] = text, variable
        return Layer(_ENVIRONMENT, values, places, _ENVIRONMENT)

    def _with_model(self, layers: list[Layer], beside: Path) -> list[Layer]:
        naming = [i for i, layer in enumerate(layers) if "model_name" in layer.values]
        if not naming:
            return layers
        named = layers[naming[-1]]
        try:
            below = files.model(str(named.values["model_name"]).strip("'\""), [beside])
        except ConfigError as error:
            self.problems += [
                Problem(("model_name",), f"{p.text} ({named.places['model_name']})") for p in error.problems
            ]
            return layers
        at = naming[-1] if named.kind == "file" else len(layers) - 2
        return [*layers[:at], *below, *layers[at:]]

    def _tell_overruled(self, layer: Layer, layers: list[Layer], key: str, text: Text, values: dict[str, Any]) -> None:
        """Say when a model's file and another file disagree: whichever wins, somebody meant the other."""
        weaker = [other for other in layers[: layers.index(layer)] if key in other.values]
        kinds = {layer.kind, weaker[-1].kind} if weaker else set()
        if kinds == {"file", "model"} and values.get(key) not in (None, _FIELDS[key].default):
            try:
                value = parse(_FIELDS[key], text)
            except ValueError:
                return
            if value != values[key]:
                place, other = layer.places[key], weaker[-1].places[key]
                self.notes.append(f"{key}={shown(value)} of {place} overrules {shown(values[key])} of {other}")

    def _set(self, values: dict[str, Any], key: str, text: Text, place: str) -> None:
        try:
            values[key] = parse(_FIELDS[key], text)
        except ValueError as error:
            self.problems.append(Problem((key,), f"{key}={shown(text)}: {error} ({place})"))

    def _unknown(self, key: str, place: str) -> None:
        if key in maxtext.NO_EFFECT:
            self.notes.append(f"{key} has no effect: {maxtext.NO_EFFECT[key]} ({place})")
            return
        self.problems.append(Problem((), unknown_key(key, _FIELDS, place)))


def _misspelt(key: str) -> bool:
    """Whether a variable was meant for a key; others may have their own variables with these prefixes."""
    return bool(difflib.get_close_matches(key, _FIELDS, n=1, cutoff=0.85))


def _placed(problem: Problem, places: Mapping[str, str]) -> Problem:
    """A problem with the places where its keys are set."""
    where = dict.fromkeys(places[key] for key in problem.keys if key in places)
    return Problem(problem.keys, f"{problem.text} ({', '.join(where)})") if where else problem


def _fresh_name(values: Mapping[str, Any]) -> str:
    """A name that no run in the output directory has."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    stem = "-".join(filter(None, (values["model_name"], values["quantization"], now)))
    name, count = stem, 1
    while (Path(values["base_output_directory"]) / name).exists():
        count += 1
        name = f"{stem}-{count}"
    return name
