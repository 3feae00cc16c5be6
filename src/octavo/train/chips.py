"""What devices can do at most, as their makers publish it, and topologies by name, such as `tpu:v5e-256`."""

import dataclasses
import difflib
import re
from collections.abc import Iterator

from octavo.train.keys import ConfigError, Problem

_T, _G = 1e12, 1e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of device. Rates are per second: FLOPs of dense products without sparsity, and bytes.

    `link` is what a device can send to the others of its `node` (0: of any number) and `network` what it can send
    beyond. A type that the device does not multiply natively has the rate of bfloat16, in which it is then multiplied.
    What is not known is 0.

    >>> chip("v5e").peak(8, is_float=False) / chip("v5e").peak(16)
    1.9949238578680204
    """

    name: str
    platform: str
    bf16: int | float = 0
    int8: int | float = 0
    fp8: int | float = 0
    memory: int | float = 0
    bandwidth: int | float = 0
    link: int | float = 0
    node: int = 0
    network: int | float = 0
    f32: int | float = 0
    note: str = ""

    def peak(self, bits: int, *, is_float: bool = True) -> int | float:
        """The most products per second, times two, of operands of so many bits."""
        if bits > 16:
            return self.f32 or self.bf16
        if bits > 8:
            return self.bf16
        return max((self.fp8 if is_float else self.int8), self.bf16)

    def sends(self, devices: int) -> int | float:
        """The bytes per second that a device sends in a collective of so many devices."""
        return self.link if not self.node or devices <= self.node else self.network


# docs/compile.md has the pages that these are from, and says what is assumed. Links are half of the bidirectional
# figure, since bytes are counted as they are sent. float32 products of TPUs are left to the compiler, which by default
# multiplies them in bfloat16; those of GPUs are TF32.
_CHIPS = (
    Chip("v5e", "tpu", 197 * _T, 393 * _T, 0, 16 * _G, 819 * _G, 200 * _G),
    Chip(
        "v5p",
        "tpu",
        459 * _T,
        918 * _T,
        0,
        95 * 2**30,
        2765 * _G,
        600 * _G,
        note="a device is a chip; Cloud TPU's names count its two cores",
    ),
    Chip("v6e", "tpu", 918 * _T, 1836 * _T, 0, 32 * _G, 1638 * _G, 400 * _G),
    Chip(
        "7x",
        "tpu",
        2307 / 2 * _T,
        0,
        4614 / 2 * _T,
        96 * 2**30,
        7380 / 2 * _G,
        300 * _G,
        note="a device is one of the two cores of a chip, with half of its memory and links",
    ),
    Chip("a100", "cuda", 312 * _T, 624 * _T, 0, 80 * _G, 2039 * _G, 300 * _G, 8, 25 * _G, 156 * _T),
    Chip("h100", "cuda", 989 * _T, 1979 * _T, 1979 * _T, 80 * _G, 3350 * _G, 450 * _G, 8, 50 * _G, 494 * _T),
    Chip("h200", "cuda", 989 * _T, 1979 * _T, 1979 * _T, 141 * _G, 4800 * _G, 450 * _G, 8, 50 * _G, 494 * _T),
    Chip("b200", "cuda", 2250 * _T, 4500 * _T, 4500 * _T, 180 * _G, 8000 * _G, 900 * _G, 8, 50 * _G, 1125 * _T),
    Chip("host", "cpu", note="nothing is published that would hold for every CPU, so no time is estimated"),
)
_DEFAULTS = {"tpu": "v5e", "cuda": "h100", "cpu": "host"}


def chips() -> dict[str, Chip]:
    """All kinds of devices by name."""
    return {chip.name: chip for chip in _CHIPS}


def chip(name: str) -> Chip:
    """A kind of device by its name."""
    return chips()[name]


@dataclasses.dataclass(frozen=True)
class Topology:
    """So many devices of a kind."""

    chip: Chip
    devices: int

    def __post_init__(self):
        if self.devices < 1:
            raise ValueError(f"a topology has 1 device or more, got {self.devices}")

    def __str__(self) -> str:
        name = "" if self.chip.platform == "cpu" else f"{self.chip.name}-"
        return f"{self.chip.platform}:{name}{self.devices}"


def topology(text: str) -> Topology:
    """The topology of a name: the platform, the kind of device and how many of them; a kind may be left out.

    >>> str(topology("tpu:v5e-256")), str(topology("cuda:8")), str(topology("cpu:8"))
    ('tpu:v5e-256', 'cuda:h100-8', 'cpu:8')
    """
    platform, _, rest = text.strip().lower().partition(":")
    match = re.fullmatch(r"(?:([\w]+)-)?(\d+)", rest)
    name = (match[1] or _DEFAULTS.get(platform, "")) if match else ""
    found = chips().get(name)
    if match is None or found is None or found.platform != platform or int(match[2]) < 1:
        known = difflib.get_close_matches(text.lower(), list(_forms()), n=12, cutoff=0.0)
        hint = f"there are {', '.join(known)}, where N is how many devices"
        raise ConfigError([Problem((), f"topology={text}: no topology is called so; {hint}")])
    return Topology(found, int(match[2]))


def _forms() -> Iterator[str]:
    for found in _CHIPS:
        yield f"{found.platform}:N" if found.platform == "cpu" else f"{found.platform}:{found.name}-N"
    yield "cuda:N"
