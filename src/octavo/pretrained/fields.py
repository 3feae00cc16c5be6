"""The metadata of a model file: typed fields, and which of them were used."""

from collections.abc import Iterable, Mapping
from typing import Any

_LARGEST = 1 << 31
_MISSING = object()


class Fields:
    """Metadata by key. A value of the wrong type raises, and `unused` names what nobody asked for.

    Args:
      values: The metadata.
      path: The file, for errors.
      prefix: Of all keys, in GGUF files.
    """

    def __init__(self, values: Mapping[str, Any], path: Any, prefix: str = ""):
        self.values, self.path, self.prefix = values, path, prefix
        self._used: set[str] = set()

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value of a key; an error if it is not there and there is no default. null is not there."""
        name = self.prefix + key
        self._used.add(name)
        value = self.values.get(name)
        if value is None and default is _MISSING:
            raise ValueError(f"{self.path} has no {name!r}, which the model needs")
        return default if value is None else value

    def int(self, key: str, default: Any = _MISSING, *, least: int = 1) -> Any:
        """An integer, such as a size."""
        value = self.get(key, default)
        if value is default:
            return value
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value < _LARGEST:
            raise ValueError(f"{self.path}: {self.prefix}{key} is an integer from {least} to 2**31, got {value!r:.50}")
        return value

    def float(self, key: str, default: Any = _MISSING) -> Any:
        """A finite number."""
        value = self.get(key, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise ValueError(f"{self.path}: {self.prefix}{key} is a number, got {value!r:.50}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise ValueError(f"{self.path}: {self.prefix}{key} is true or false, got {value!r:.50}")
        return value

    def floats(self, key: str, default: Any = _MISSING) -> tuple[Any, ...]:
        """A list of finite numbers."""
        value = self.get(key, default)
        if not isinstance(value, (list, tuple)) or any(type(x) not in (int, float) for x in value):
            raise ValueError(f"{self.path}: {self.prefix}{key} is a list of numbers, got {value!r:.50}")
        return tuple(map(float, value))

    def check_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise where a key of a computation that is not supported has another value than those that turn it off."""
        for key, allowed in neutral.items():
            value = self.get(key, None)
            if value is not None and value not in allowed:
                raise ValueError(f"{self.path}: {self.prefix}{key}={value!r:.50} is not supported, only {allowed[0]!r}")

    def unused(self, inert: Iterable[str]) -> list[str]:
        """Keys with the prefix that were not used, and are none of those that do not change the computation."""
        known = self._used | {self.prefix + key for key in inert}
        return sorted(key for key in self.values if key.startswith(self.prefix) and key not in known)


def check_layers(path: Any, key: str, layers: int, names: Iterable[str], prefix: str) -> None:
    """Raise unless a file has tensors of just this number of layers; before anything of that size is made."""
    start, _, end = prefix.partition("{}")
    found = {name[len(start) :].split(end or ".", 1)[0] for name in names if name.startswith(start)}
    found = {number for number in found if number.isdecimal()}
    count = max((int(number) + 1 for number in found if len(number) < 10), default=0)
    if count != layers:
        raise ValueError(f"{path}: {key} is {layers}, but the file has the tensors of {count} layers")


def check_placed(path: Any, names: Iterable[str], placed: Iterable[str], ignored: tuple[str, ...] = ()) -> None:
    """Raise if a file has tensors that the model has not: they would be left out of what is computed."""
    left = sorted(name for name in set(names) - set(placed) if not name.endswith(ignored))
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ValueError(
            f"{path} has the tensors {', '.join(left[:3])}{more}, which have no place in the model that the file "
            "describes: this kind of model is not supported, or its configuration is of another one"
        )
