"""The device mesh of a run: six axes, with a size within a slice and a size across slices each.

`ici_*_parallelism` is along the fast links within a slice of devices, `dcn_*_parallelism` across slices, over the
network between them; the size of an axis is the one times the other.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.train.config import Config, ConfigError
from octavo.train.config.checks import AXES


@dataclasses.dataclass(frozen=True)
class AxisSizes:
    """The size of each mesh axis, within a slice and across slices.

    >>> str(AxisSizes({"fsdp": 4, "tensor": 2}, {"data": 2}))
    'data=2 x fsdp=4 x tensor=2'
    """

    ici: Mapping[str, int]
    dcn: Mapping[str, int]

    def __getitem__(self, axis: str) -> int:
        return self.ici.get(axis, 1) * self.dcn.get(axis, 1)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={self[axis]}" for axis in AXES if self[axis] > 1) or "one device"


def axis_sizes(config: Config, devices: int, slices: int = 1) -> AxisSizes:
    """The axis sizes of a configuration on so many devices in so many slices; -1 is inferred from the others.

    >>> str(axis_sizes(Config(ici_tensor_parallelism=2), 8))
    'fsdp=4 x tensor=2'
    """
    asked = {kind: {axis: getattr(config, f"{kind}_{axis}_parallelism") for axis in AXES} for kind in ("ici", "dcn")}
    dcn = _infer("dcn", asked["dcn"], slices, "slices", exact=False)
    across = math.prod(dcn.values())
    if devices % across:
        raise ConfigError([f"{_product('dcn', dcn)} does not divide the {devices} devices of this run"])
    return AxisSizes(
        _infer("ici", asked["ici"], devices // across, "devices" if across == 1 else "devices of a slice"), dcn
    )


def _infer(kind: str, asked: dict[str, int], count: int, what: str, exact: bool = True) -> dict[str, int]:
    known = math.prod(size for size in asked.values() if size > 0)
    if -1 in asked.values():
        if count % known:
            text = f"{_product(kind, asked)} does not divide the {count} {what}: nothing is left that -1 could be"
            raise ConfigError([text])
        return {axis: count // known if size == -1 else size for axis, size in asked.items()}
    if exact and known != count:
        text = f"{_product(kind, asked)}, but there are {count} {what}: let one be -1, or set num_devices"
        raise ConfigError([text])
    return asked


def _product(kind: str, asked: Mapping[str, int]) -> str:
    sizes = {f"{kind}_{axis}_parallelism": size for axis, size in asked.items() if size > 1}
    return format_sizes(sizes) if sizes else f"{kind}_*_parallelism of 1"


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Sizes and their product.

    >>> format_sizes({"fsdp": 4, "tensor": 2})
    'fsdp=4 x tensor=2 = 8'
    """
    words = " x ".join(f"{name}={size}" for name, size in sizes.items()) or "1"
    return f"{words} = {math.prod(sizes.values())}" if len(sizes) > 1 else words


def run_devices(config: Config, devices: Sequence[Any] | None = None) -> list[Any]:
    """The devices of a run: all that there are, or the first `num_devices`."""
    import jax

    found = list(jax.devices() if devices is None else devices)
    wanted = config.num_devices or len(found)
    if wanted > len(found):
        raise ConfigError([f"num_devices={wanted}, but there are {len(found)} devices"])
    if wanted < len(found) and len({device.process_index for device in found}) > 1:
        text = f"num_devices={wanted}: a run of several processes uses all of its {len(found)} devices"
        raise ConfigError([text])
    return found[:wanted]


def make_mesh(config: Config, devices: Sequence[Any] | None = None) -> Any:
    """The mesh of a run, on the devices that there are or on given ones, which may be only described (`topologies`).

    >>> dict(make_mesh(Config(num_devices=1)).shape)
    {'data': 1, 'stage': 1, 'fsdp': 1, 'context': 1, 'tensor': 1, 'expert': 1}
    """
    from jax.sharding import AxisType, Mesh

    chosen = run_devices(config, devices)
    groups = _slices(chosen)
    sizes = axis_sizes(config, len(chosen), len(groups))
    if missing := [axis for axis in AXES if axis not in config.mesh_axes and sizes[axis] > 1]:
        raise ConfigError([f"{missing[0]}={sizes[missing[0]]}, but mesh_axes has no {missing[0]}"])
    grid = _grid(chosen, groups, sizes, config.mesh_axes)
    kind = AxisType.Explicit if config.shard_mode == "explicit" else AxisType.Auto
    return Mesh(grid, config.mesh_axes, axis_types=(kind,) * grid.ndim)


def _slices(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices by slice; one slice where the platform has none."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    return [groups[number] for number in sorted(groups)]


def _grid(devices: list[Any], groups: list[list[Any]], sizes: AxisSizes, axes: Sequence[str]) -> np.ndarray:
    from jax.experimental import mesh_utils

    ici, dcn = [sizes.ici[axis] for axis in axes], [sizes.dcn[axis] for axis in axes]
    across = math.prod(dcn)
    if across == 1:
        return mesh_utils.create_device_mesh(ici, devices)
    if len(groups) == across:
        return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices)
    if len(groups) > 1:
        text = f"{_product('dcn', sizes.dcn)}, but the devices are in {len(groups)} slices"
        raise ConfigError([text])
    # No slices on this platform: consecutive devices are used as slices.
    return _blocks(np.asarray(devices, object), ici, dcn)


def _blocks(devices: np.ndarray, ici: Sequence[int], dcn: Sequence[int]) -> np.ndarray:
    """Consecutive devices as slices: along each axis, the part across slices is the slow one."""
    grid = devices.reshape(*dcn, *ici)
    count = len(ici)
    order = [axis for pair in zip(range(count), range(count, 2 * count), strict=True) for axis in pair]
    return grid.transpose(order).reshape([a * b for a, b in zip(dcn, ici, strict=True)])


def global_batch_size(config: Config, devices: int) -> int:
    """The number of sequences in a step: `per_device_batch_size` per device.

    >>> global_batch_size(Config(per_device_batch_size=0.5), 8)
    4
    """
    rows = config.per_device_batch_size * devices
    if rows != int(rows) or rows < 1:
        text = f"per_device_batch_size={config.per_device_batch_size:g} on {devices} devices makes {rows:g} rows"
        raise ConfigError([f"{text}, which is no whole number of at least 1"])
    return int(rows)
