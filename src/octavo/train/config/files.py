"""Configuration files: where they are found, what they inherit, and the line of each key."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from octavo._documents import check_depth
from octavo._names import did_you_mean, unknown_name
from octavo.train.config.values import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
"""The directory of the built-in configuration files."""

type Text = str | list[str]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The texts that one source sets by key, and where each is written."""

    name: str
    values: dict[str, Text]
    locations: dict[str, str]
    kind: str = "file"


def read_layers(path: str) -> list[Layer]:
    """A file and those it inherits from by `base_config`, weakest first.

    >>> [layer.name for layer in read_layers("configs/deepseek_fp8.yml")]
    ['configs/base.yml', 'configs/deepseek_fp8.yml']
    """
    return list(reversed(list(_inherited(path, None, ()))))


def read_model_layers(name: str, directory: Path) -> list[Layer]:
    """The file of a model and those it inherits from, from a directory `models` or from Octavo, weakest first."""
    folders = [directory / "models", Path("configs/models"), CONFIGS / "models"]
    for folder in folders:
        found = folder / f"{name}.yml"
        # os.path answers no for names that no file can have; Path.is_file raises.
        if os.path.isfile(found):
            return [dataclasses.replace(layer, kind="model") for layer in read_layers(str(found))]
    known = sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.yml")})
    text = f"{did_you_mean(name, known)}There is no models/{name}.yml; known: {', '.join(known)}"
    raise ConfigError([f"model_name={name}: {text}"])


def model_names() -> tuple[str, ...]:
    """The names of the built-in models; those named by size, such as `10m`, are first and in order.

    >>> "llama-1b" in model_names()
    True
    """
    names = (path.stem for path in (CONFIGS / "models").glob("*.yml"))
    return tuple(sorted(names, key=lambda name: (not name[0].isdigit(), len(name) if name[0].isdigit() else 0, name)))


def find_file(path: str, directory: Path | None = None) -> Path:
    """The file of a path: relative to the one that names it, to the working directory, or among Octavo's own.

    >>> find_file("configs/base.yml") == CONFIGS / "base.yml"
    True
    """
    wanted = Path(path).expanduser()
    if directory is not None and os.path.isfile(directory / wanted):
        return directory / wanted
    if os.path.isfile(wanted):
        return wanted
    parts = wanted.parts
    if "configs" in parts:
        parts = parts[len(parts) - parts[::-1].index("configs") :]
    elif len(parts) > 1:
        parts = ()
    own = CONFIGS.joinpath(*parts)
    if parts and os.path.isfile(own):
        return own
    known = [str(Path("configs") / file.relative_to(CONFIGS)) for file in sorted(CONFIGS.rglob("*.yml"))]
    raise ConfigError([f"there is no file {path}: {unknown_name(path, known)}"])


def _inherited(path: str, directory: Path | None, above: tuple[Path, ...]) -> Iterator[Layer]:
    file = find_file(path, directory)
    if file.resolve() in above:
        names = " -> ".join(p.name for p in (*above, file))
        raise ConfigError([f"base_config: files inherit from each other in a circle, {names}"])
    layer = _read_layer(file)
    base = layer.values.pop("base_config", "")
    yield layer
    if isinstance(base, list):
        raise ConfigError([f"{layer.locations['base_config']}: base_config is one file, got a list"])
    if base and base.lower() not in ("none", "null"):
        yield from _inherited(base, file.parent, (*above, file.resolve()))


def _read_layer(file: Path) -> Layer:
    name = _display_name(file)
    try:
        # Scalars are kept as text: the type of the key, not YAML, decides how 3e-4 or none is parsed.
        text = file.read_text(encoding="utf-8")
        check_depth(text)
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{name} is no YAML: {error}"]) from None
    except ValueError as error:
        raise ConfigError([f"{name}: {error}"]) from None
    except RecursionError:
        raise ConfigError([f"{name} is nested too deeply"]) from None
    values, locations, problems = {}, {}, []
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise ConfigError([f"{name} is no mapping of keys to values"])
    for key, value in node.value if node is not None else ():
        location = f"{name}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            problems.append(f"{location}: a key is a {key.id}, not text")
        elif key.value in values:
            problems.append(
                f"{location}: {key.value} is set already, on line {locations[key.value].rpartition(':')[2]}"
            )
        elif isinstance(value, yaml.MappingNode) or not _is_flat(value):
            problems.append(f"{location}: {key.value} is nested; a value is a number, a text or a list of them")
        else:
            values[key.value] = value.value if isinstance(value, yaml.ScalarNode) else [v.value for v in value.value]
            locations[key.value] = location
    if problems:
        raise ConfigError(problems)
    return Layer(name, values, locations)


def _is_flat(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) or all(isinstance(item, yaml.ScalarNode) for item in node.value)


def _display_name(file: Path) -> str:
    """A path relative to the working directory or to Octavo's own files."""
    file = file.resolve()
    for root, prefix in ((CONFIGS.resolve(), "configs"), (Path.cwd(), "")):
        if file.is_relative_to(root):
            return (Path(prefix) / file.relative_to(root)).as_posix()
    return str(file)
