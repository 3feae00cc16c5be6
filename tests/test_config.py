"""Configs convert to JSON and back, and a user's class never replaces a built-in one."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest

import octavo
from octavo._config import Config
from octavo.calibration import AbsMax, Constant, Fixed, Percentile, Rms, Weighted
from octavo.compat.aqt import LocalAqt
from octavo.numerics import BlockFormat, FloatFormat, IntFormat, TableFormat, UnroundedFormat, get_format

# Classes with fields that have no default.
EXAMPLES = {
    "BlockFormat": BlockFormat(name="b", element=get_format("fp4")),
    "Constant": Constant(2.0),
    "Fixed": Fixed(-1.0, 6.0),
    "FloatFormat": FloatFormat(exponent_bits=3, mantissa_bits=2),
    "IntFormat": IntFormat(bits=5),
    "LocalAqt": LocalAqt(contraction_axis_shard_count=2),
    "Operand": octavo.Operand("int8", tile=32),
    "Percentile": Percentile(99.0),
    "Quantizer": octavo.Quantizer("int4", tiled_axes={0: 16}, calibration="mse"),
    "Recipe": octavo.Recipe(name="r", summary="s", source="-", rules=(octavo.QtRule(weight_qtype="int8"),)),
    "Rms": Rms(3.0),
    "Schedule": octavo.Schedule([(0, None), (10, "int8")], freeze_at=20),
    "TableFormat": TableFormat(name="t", values=(-1.0, 0.5)),
    "UnroundedFormat": UnroundedFormat(base=IntFormat(bits=8)),
    "Weighted": Weighted(l1=1.5, absmax=0.25),
}


def classes():
    """Every concrete config class of Octavo's core."""
    core = ("numerics", "calibration", "qarray", "ops", "rules", "transform", "compat")
    for package in core:
        path = importlib.import_module(f"octavo.{package}").__path__
        for module in pkgutil.walk_packages(path, f"octavo.{package}."):
            if "-" not in module.name:
                importlib.import_module(module.name)
    prefixes = tuple(f"octavo.{package}." for package in core)
    own = {name: cls for name, cls in Config._classes.items() if cls.__module__.startswith(prefixes)}
    return {
        name: cls for name, cls in own.items() if "__dataclass_fields__" in vars(cls) and not inspect.isabstract(cls)
    }


def test_every_config_round_trips_through_json():
    for name, cls in classes().items():
        config = EXAMPLES[name] if name in EXAMPLES else cls()
        assert type(config) is cls
        back = Config.from_json(config.to_json())
        assert back == config
        assert hash(back) == hash(config)
        assert repr(back) == repr(config)


def test_a_users_class_of_the_same_name_is_another_class():
    own = dataclasses.dataclass(frozen=True, repr=False)(type("AbsMax", (AbsMax,), {"__module__": "mine"}))
    assert Config.from_json(AbsMax(0.5).to_json()) == AbsMax(0.5)
    assert type(Config.from_json(own(0.5).to_json())) is own
    assert '"mine.AbsMax"' in own(0.5).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"class": "AbsMex"}',
            "unknown config class 'AbsMex': did you mean 'AbsMax'.*import the module",
        ),
        ('{"factor": 1.0}', r"has the name of its class under 'class', got the keys \['factor'\]"),
    ],
)
def test_unknown_classes_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        Config.from_json(text)
