"""The sources of a configuration, and which one overrides which.

From weak to strong: the defaults, YAML files (`base_config` first), the environment, `key=value`. The file of the model
is just below the file that names the model; if the environment or the command line names it, above all files. So
`model_name=10m` on the command line overrides a file, and the other keys of a file that sets it override the model.
"""

import dataclasses
import datetime
import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from octavo import _remote
from octavo._names import did_you_mean
from octavo.train.config import files, maxtext
from octavo.train.config.conflicts import METHODS, find_notes
from octavo.train.config.files import Layer, Text
from octavo.train.config.schema import Config
from octavo.train.config.values import ConfigError, Problem, format_value, parse, unknown_key

_PREFIXES = ("OCTAVO_", "M_")
_COMMAND, _ENVIRONMENT = "command line", "environment"
_FIELDS = {field.name: field for field in dataclasses.fields(Config)}
_PATHS = ("load_parameters_path", "quant_cfg_path", "quantization_rules_path")


class Sources(dict[str, str]):
    """Where each key that is set anywhere was set last, such as `mine.yml:3`; `notes` are further messages."""

    def __init__(self, locations: Mapping[str, str], notes: Sequence[str] = ()):
        super().__init__(locations)
        self.notes = tuple(notes)


class Loaded(NamedTuple):
    """A configuration and its sources."""

    config: Config
    sources: Sources


def load(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """The configuration of a command line.

    Args:
      argv: At most one YAML file, and any number of `key=value`.
      environ: The environment; that of the process by default.

    Raises:
      ConfigError: Lists all problems of the configuration, each with where its keys were set.

    >>> config, sources = load(["configs/base.yml", "steps=50", "learning_rate=3e-4"], environ={})
    >>> config.steps, config.learning_rate, sources["steps"]
    (50, 0.0003, 'command line')
    """
    loader = _Loader()
    layers = loader.layers(list(argv), os.environ if environ is None else environ)
    return loader.resolve(*loader.merge(layers))


class _Loader:
    """Collects problems and notes while the sources are read."""

    def __init__(self):
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def layers(self, argv: list[str], environ: Mapping[str, str]) -> list[Layer]:
        """All sources, weakest first."""
        paths, command = self._arguments(argv)
        environment = self._environment(environ)
        for key in sorted(set(command.values) & set(environment.values)):
            self._add(f"{key} is set by the command line and by {environment.locations[key]}: unset one of them", key)
        try:
            read = [layer for path in paths for layer in files.read_layers(path)]
        except ConfigError as error:
            self.problems += error.problems
            read = []
        return self._with_model([*read, environment, command], Path(paths[0]).parent if paths else Path())

    def merge(self, layers: list[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
        """The strongest value of each key, and where it is set."""
        values: dict[str, Any] = {}
        locations: dict[str, str] = {}
        for i, layer in enumerate(layers):
            for key, text in layer.values.items():
                location = layer.locations[key]
                if (reason := maxtext.no_effect(key)) is not None:
                    self.notes.append(f"{key} has no effect: {reason} ({location})")
                elif key not in _FIELDS:
                    self._add(unknown_key(key, _FIELDS, location))
                else:
                    try:
                        value = parse(_FIELDS[key], text)
                    except ValueError as error:
                        self._add(f"{key}={format_value(text)}: {error} ({location})", key)
                    else:
                        self._note_override(layer, layers[:i], key, value, values)
                        values[key] = value
                    locations[key] = location
        return values, locations

    def resolve(self, values: dict[str, Any], locations: dict[str, str]) -> Loaded:
        """The configuration, if there is no problem."""
        common = values.get("quantization_calibration_method")
        for key in METHODS:
            # Checked here, because only the sources tell an explicit "absmax" from the default.
            if common and common != values.get(key, common) == "absmax" and locations[key] in (_COMMAND, _ENVIRONMENT):
                self._add(
                    f"quantization_calibration_method={common} and {key}=absmax: set either it or the three methods"
                )
        named: dict[str, Any] = {} if values.get("run_name") else {"run_name": _fresh_name(values)}
        unread = {key for problem in self.problems for key in problem.keys}
        config = None
        try:
            config = Config(**values | named)
        except ConfigError as error:
            self.problems += [_with_source(p, locations) for p in error.problems if not unread & set(p.keys)]
        if config is not None and not self.problems:
            self.problems += [_with_source(problem, locations) for problem in _missing_files(config)]
        if config is None or self.problems:
            raise ConfigError(self.problems)
        locations |= dict.fromkeys(named, "from model, recipe and time")
        return Loaded(config, Sources(locations, [*self.notes, *find_notes(config.to_dict())]))

    def _add(self, text: str, *keys: str) -> None:
        self.problems.append(Problem(keys, text))

    def _arguments(self, argv: list[str]) -> tuple[list[str], Layer]:
        paths, values, rest = [], {}, iter(argv)
        for word in rest:
            key, equals, text = word.partition("=")
            name = key.lstrip("-")
            if not equals and name != key and (name in _FIELDS or maxtext.no_effect(name)):
                value = next(rest, "VALUE")
                self._add(f"{word} {value}: write {name}={value}, without dashes")
                continue
            if equals:
                if key != name:
                    self._add(f"{word}: write {name}={text}, without dashes")
                if values.setdefault(name, text) != text:
                    self._add(f"{name}={values[name]} and {name}={text}: give it once", name)
            elif word.endswith((".yml", ".yaml")):
                paths.append(word)
            else:
                self._add(f"{word}: neither a .yml file nor key=value")
        if len(paths) > 1:
            self._add(f"{' and '.join(paths)}: one file is read; let it inherit from others by base_config")
        if values.pop("base_config", None) is not None:
            self._add("base_config is for files; give the file itself as the first argument")
        return paths[:1], Layer(_COMMAND, values, dict.fromkeys(values, _COMMAND), _COMMAND)

    def _environment(self, environ: Mapping[str, str]) -> Layer:
        values: dict[str, Text] = {}
        locations: dict[str, str] = {}
        for prefix in _PREFIXES:
            for variable in (name for name in environ if name.startswith(prefix)):
                key = variable.removeprefix(prefix).lower()
                if key in values:
                    self._add(f"{locations[key]} and {variable} are both set: unset one", key)
                # Others may have their own variables with these prefixes: a key, or nearly one, is meant for us.
                elif key in _FIELDS or maxtext.no_effect(key) or did_you_mean(key, _FIELDS, cutoff=0.85):
                    values[key], locations[key] = environ[variable], variable
        return Layer(_ENVIRONMENT, values, locations, _ENVIRONMENT)

    def _with_model(self, layers: list[Layer], directory: Path) -> list[Layer]:
        naming = [i for i, layer in enumerate(layers) if "model_name" in layer.values]
        if not naming:
            return layers
        layer = layers[naming[-1]]
        try:
            below = files.read_model_layers(str(layer.values["model_name"]).strip("'\""), directory)
        except ConfigError as error:
            for problem in error.problems:
                self._add(f"{problem.text} ({layer.locations['model_name']})", "model_name")
            return layers
        at = naming[-1] if layer.kind == "file" else len(layers) - 2
        return [*layers[:at], *below, *layers[at:]]

    def _note_override(self, layer: Layer, weaker: list[Layer], key: str, value: Any, values: dict[str, Any]) -> None:
        """Note when a model's file and another file set different values, whichever of them wins."""
        others = [other for other in weaker if key in other.values]
        before = values.get(key)
        if (
            others
            and {layer.kind, others[-1].kind} == {"file", "model"}
            and before not in (None, _FIELDS[key].default, value)
        ):
            new, old = f"{key}={format_value(value)} of {layer.locations[key]}", others[-1].locations[key]
            self.notes.append(f"{new} overrides {format_value(before)} of {old}")


def _with_source(problem: Problem, locations: Mapping[str, str]) -> Problem:
    """A problem with where its keys were set."""
    found = dict.fromkeys(locations[key] for key in problem.keys if key in locations)
    return Problem(problem.keys, f"{problem.text} ({', '.join(found)})") if found else problem


def _fresh_name(values: Mapping[str, Any]) -> str:
    """A run name that is free in the output directory."""
    given = {name: values.get(name, _FIELDS[name].default) for name in ("model_name", "quantization")}
    stem = "-".join([*filter(None, given.values()), datetime.datetime.now().strftime("%Y%m%d-%H%M%S")])
    directory = values.get("base_output_directory", _FIELDS["base_output_directory"].default)
    name, count = stem, 1
    if _remote.is_remote(directory):
        return name
    directory = Path(directory)
    while os.path.exists(directory / name):  # unlike Path.exists, not an error for names that no file can have
        count += 1
        name = f"{stem}-{count}"
    return name


def _missing_files(config: Config) -> list[Problem]:
    """Problems with the files that a configuration names; remote paths (`gs://...`) are not checked."""
    names = list(_PATHS)
    if config.dataset_type in ("text", "tokens", "chat"):
        names += ["dataset_path", "eval_dataset_path"]
    if config.tokenizer_type == "huggingface":
        names.append("tokenizer_path")
    problems = []
    for name in names:
        given = getattr(config, name)
        if not given or "://" in given:
            continue
        path = Path(given).expanduser()
        # A pattern is a path too: data may be many files.
        if not path.exists() and not glob.glob(str(path), recursive=True):
            problems.append(Problem((name,), f"{name}={given}: there is no such file or directory"))
        elif name in ("quant_cfg_path", "quantization_rules_path"):
            from octavo.rules import as_rules, mixed_precision

            try:
                mixed_precision(path) if name == "quant_cfg_path" else as_rules(path)
            except (ValueError, OSError, yaml.YAMLError) as error:
                problems.append(Problem((name,), f"{name}={given}: {error}"))
    return problems
