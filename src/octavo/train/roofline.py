"""How long a step takes at least, if devices reached what their makers publish: an estimate to plan with.

Three times are computed for one device: of its products at the peak rate of the types that are multiplied, of the bytes
that those products, collectives and the update move through its memory, and of the bytes that it sends. If all three
overlapped perfectly, a step would take the longest of them; if not at all, their sum.
"""

import dataclasses
from collections.abc import Iterable

from octavo.hlo.collectives import Traffic
from octavo.hlo.work import Work
from octavo.train.chips import Chip


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one device.

    >>> Roofline(compute=0.2, memory=0.1, network=0.05).bound
    'compute'
    """

    compute: int | float
    memory: int | float
    network: int | float

    @property
    def overlapped(self) -> int | float:
        """The longest: everything at the same time."""
        return max(self.compute, self.memory, self.network)

    @property
    def serial(self) -> int | float:
        """The sum: one after the other."""
        return self.compute + self.memory + self.network

    @property
    def bound(self) -> str:
        """What the longest is for."""
        times = dataclasses.asdict(self)
        return max(times, key=times.__getitem__)


def flops_by_type(work: Iterable[Work]) -> dict[str, int]:
    """The FLOPs of a device by the types that are multiplied, the most first."""
    found: dict[str, int] = {}
    for product in work:
        found[product.types] = found.get(product.types, 0) + product.count * product.flops
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def memory_bytes(work: Iterable[Work], traffic: Traffic, held: int) -> int:
    """What a device moves through its memory: operands and results of products, what collectives write, and what it
    holds between steps, read and written once. What is done element by element is taken to be fused with these."""
    sent = sum(c.count * c.written for c in traffic.collectives)
    return sum(w.count * w.bytes for w in work) + sent + 2 * held


def estimate(work: Iterable[Work], traffic: Traffic, held: int, chip: Chip) -> Roofline | None:
    """The times of a step on a device that holds `held` bytes between steps; None where nothing is published of it."""
    if not chip.bf16:
        return None
    work = tuple(work)
    compute = sum(w.count * w.flops / chip.peak(w.bits, is_float=not w.is_integer) for w in work)
    network = sum(c.total / chip.sends(c.group_size) for c in traffic.collectives)
    return Roofline(compute, memory_bytes(work, traffic, held) / chip.bandwidth, network)
