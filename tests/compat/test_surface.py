"""Every public name of Qwix and AQT: its structure here, and that it has a case of its own or a row "not here"."""

import ast
import dataclasses
import enum
import importlib
import inspect
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.compat import aqt, aqt_flax
from octavo.compat import qwix as compat
from tests.compat import test_aqt_flax, test_qwix_contrib
from tests.docs.test_pages import table

MISSING = object()


class Name(NamedTuple):
    """A public name of a peer: the peer's object, ours, and whether the docs say that it is not here."""

    peer: str
    name: str
    theirs: Any
    ours: Any
    listed: bool


def surface():
    qwix = importlib.import_module("qwix")
    importlib.import_module("qwix.pallas")
    importlib.import_module("octavo.compat.qwix.pallas")
    for name in sorted(name for name in dir(qwix) if not name.startswith("_")):
        yield Name("qwix", name, getattr(qwix, name), getattr(compat, name, MISSING), False)
    contrib = [line.strip("| ").split(" | ") for line in table("contrib", "from-qwix.md")]
    gone = {(m.strip("`"), n) for m, names, text in contrib for n in names.replace("`", "").split(", ")
            if text.startswith("not here")}  # fmt: skip
    for module in test_qwix_contrib.modules():
        theirs = importlib.import_module(f"qwix.contrib.{module}")
        try:
            ours = importlib.import_module(f"octavo.compat.qwix.contrib.{module}")
        except ImportError:
            ours = None
        for name in sorted(test_qwix_contrib.public_names(theirs)):
            yield Name(
                f"qwix.contrib.{module}",
                name,
                getattr(theirs, name),
                getattr(ours, name, MISSING),
                (module, name) in gone,
            )
    config = importlib.import_module("aqt.jax.v2.config")
    texts = {name: text for *_, name, text in test_aqt_flax.cells("config")}
    for name in sorted(test_aqt_flax.public_names(config)):
        listed = texts[name].startswith("not here")
        yield Name("aqt.config", name, getattr(config, name), getattr(aqt, name, MISSING), listed)
    texts = {(module.strip("`"), name): text for module, name, text in test_aqt_flax.cells("flax")}
    for module in test_aqt_flax.flax_modules():
        theirs = importlib.import_module(f"aqt.jax.v2.flax.{module}")
        for name in sorted(test_aqt_flax.public_names(theirs)):
            text = texts[module, name]
            ours = getattr(aqt if "in `octavo.compat.aqt`" in text else aqt_flax, name, MISSING)
            yield Name(f"aqt.flax.{module}", name, getattr(theirs, name), ours, text.startswith("not here"))


SURFACE = list(surface())
PEERS = list(dict.fromkeys(n.peer for n in SURFACE))

# Names whose objects have other fields or parameters, which the docs say.
DIFFERENT = {
    "DotGeneral", "DotGeneralRaw", "Tensor",  # names of configs
    "MeanOfAbsMaxCalibration",  # a mark for set_fwd_calibration
    "set_numerics",  # of a Matmul
    "PaddedQArray",  # QArray itself
}  # fmt: skip
# Parameters and fields that are not here: of AQT's old freezer, of its tiling, of LocalAqt by size, and noise by a
# function, which a rounding has here.
ABSENT = {
    "lhs_init", "lhs_scale_init", "rhs_init", "rhs_scale_init", "tiling_fn",
    "contraction_axis_shard_size", "tile_largest_shape", "initialize_calibration", "allow_dummy_gradients", "noise_fn",
}  # fmt: skip
# Parameters that have another name here, and are positional in programs.
RENAMED = {"cfg": "config"}


def accepted(value):
    """The names of the parameters of a function or class, and whether it takes others."""
    if dataclasses.is_dataclass(value):
        return {f.name for f in dataclasses.fields(value) if f.init}, False
    found = inspect.signature(value).parameters.values()
    names = {p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name[0] != "_"}
    return names, any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found)


def check_structure(name):
    theirs, ours = name.theirs, name.ours
    if isinstance(theirs, type) and issubclass(theirs, enum.Enum):
        assert [m.name for m in ours] == [m.name for m in theirs]
    elif isinstance(theirs, types.ModuleType) or not callable(theirs):
        assert isinstance(ours, type(theirs))
    elif name.name not in DIFFERENT:
        assert callable(ours)
        try:
            (wanted, _), (found, anything) = accepted(theirs), accepted(ours)
        except ValueError:  # an alias of types has no signature
            return
        wanted = {RENAMED.get(key, key) if RENAMED.get(key) in found else key for key in wanted} - ABSENT
        assert wanted <= found or anything, wanted - found


@pytest.mark.parametrize("peer", PEERS)
def test_structure(peer, record_property):
    names = [n for n in SURFACE if n.peer == peer]
    offered = [n for n in names if not n.listed]
    for name in offered:
        assert name.ours is not MISSING, f"{name.name} of {peer} is neither here nor listed as missing"
        check_structure(name)
    record_property("names", f"{len(offered)}/{len(names)}")


def used_names():
    """Attributes, names and strings in the tests of this folder, by which a case calls what it tests."""
    found = set()
    folder = Path(__file__).parent
    for path in (*folder.glob("test_*.py"), folder.parent / "lora" / "test_qwix.py"):
        if path != Path(__file__):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    found.add(node.attr)
                elif isinstance(node, ast.Name):
                    found.add(node.id)
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    found.update(part for alias in node.names for part in alias.name.split("."))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.update(node.value.split() if len(node.value) < 80 else ())
    return found


def test_every_name_has_a_case():
    used = used_names()
    without = [f"{n.peer}.{n.name}" for n in SURFACE if not n.listed and n.name not in used]
    assert not without
    print(f"{sum(not n.listed for n in SURFACE)} of {len(SURFACE)} public names of Qwix and AQT have a case")
