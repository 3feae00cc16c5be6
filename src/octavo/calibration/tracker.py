"""Ranges over several steps, as explicit state: trackers are pure functions of a pytree.

Every tracker has `init`, `update` and `read`, and two ways to combine states: `sync` across the devices of a mapped
axis, and `merge` for the microbatches of one step.
"""

import abc
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from octavo._config import Config
from octavo.calibration.method import Bounds

type State = dict[str, jax.Array]


class Tracker(Config, abc.ABC):
    """Combines the bounds of several steps."""

    @property
    def reads_current(self) -> bool:
        """Whether the bounds of the present tensor are read, as long as nothing was measured before."""
        return True

    @abc.abstractmethod
    def init(self, bounds: Bounds) -> State:
        """The initial state, for bounds of this structure and shape (their values do not matter)."""

    @abc.abstractmethod
    def update(self, state: State, bounds: Bounds) -> State:
        """The state after one more measurement."""

    @abc.abstractmethod
    def _read(self, state: State) -> Bounds:
        """The bounds of a calibrated state."""

    @abc.abstractmethod
    def calibrated(self, state: State) -> jax.Array:
        """Whether anything was measured yet: one boolean, or one per group."""

    @abc.abstractmethod
    def merge(self, a: State, b: State) -> State:
        """The state of two microbatches, from the state of each."""

    @abc.abstractmethod
    def sync(self, state: State, axis_name: str) -> State:
        """The state of all devices along a mapped axis."""

    def read(self, state: State, current: Bounds | None = None) -> Bounds:
        """The bounds; where nothing was measured yet, `current` if given.

        Without `current`, reading an uncalibrated state raises, or under a trace, where no error can be raised, gives
        NaN: never a scale that happens to be finite.
        """
        ready = self.calibrated(state)
        if current is None:
            if not isinstance(ready, jax.core.Tracer) and not bool(jnp.all(ready)):
                raise ValueError(
                    f"{type(self).__name__} was read before anything was measured: run a calibration step first "
                    "(update), or pass current= to fall back on the present tensor's own range"
                )
            return {k: jnp.where(ready, v, jnp.nan) for k, v in self._read(state).items()}
        return {k: jnp.where(ready, v, current[k].astype(v.dtype)) for k, v in self._read(state).items()}


@dataclasses.dataclass(frozen=True, repr=False)
class RunningMean(Tracker):
    """The plain mean of all bounds so far: state `count` and `sum_of_absmax`, or `sum_of_min` and `sum_of_max`.

    >>> mean = RunningMean()
    >>> state = mean.update(mean.init({"absmax": jnp.ones(1)}), {"absmax": jnp.full(1, 3.0)})
    >>> int(state["count"]), float(mean.read(state)["absmax"][0])
    (1, 3.0)
    """

    def init(self, bounds: Bounds) -> State:
        sums = {f"sum_of_{k}": jnp.zeros(v.shape, jnp.float32) for k, v in bounds.items()}
        return {"count": jnp.zeros((), jnp.int32), **sums}

    def update(self, state: State, bounds: Bounds) -> State:
        sums = {f"sum_of_{k}": state[f"sum_of_{k}"] + v.astype(jnp.float32) for k, v in bounds.items()}
        return {"count": state["count"] + 1, **sums}

    def _read(self, state: State) -> Bounds:
        count = jnp.maximum(state["count"], 1).astype(jnp.float32)
        return {k.removeprefix("sum_of_"): v / count for k, v in state.items() if k != "count"}

    def calibrated(self, state: State) -> jax.Array:
        return state["count"] > 0

    def merge(self, a: State, b: State) -> State:
        return jax.tree.map(jnp.add, a, b)

    def sync(self, state: State, axis_name: str) -> State:
        sums = {k: jax.lax.pmean(v, axis_name) for k, v in state.items() if k != "count"}
        return {"count": jax.lax.pmax(state["count"], axis_name), **sums}


@dataclasses.dataclass(frozen=True, repr=False)
class Ema(Tracker):
    """An exponential moving average, corrected for its start: the first step reads as that step's own bounds.

    The state holds the average of the bounds and, as `weight`, the same average of ones.
    """

    decay: float = 0.99

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise ValueError(f"a decay is at least 0 and below 1, got {self.decay}")

    def init(self, bounds: Bounds) -> State:
        averages = {f"ema_of_{k}": jnp.zeros(v.shape, jnp.float32) for k, v in bounds.items()}
        return {"weight": jnp.zeros((), jnp.float32), **averages}

    def update(self, state: State, bounds: Bounds) -> State:
        keep, new = self.decay, 1 - self.decay
        averages = {f"ema_of_{k}": keep * state[f"ema_of_{k}"] + new * v.astype(jnp.float32) for k, v in bounds.items()}
        return {"weight": keep * state["weight"] + new, **averages}

    def _read(self, state: State) -> Bounds:
        weight = jnp.where(state["weight"] > 0, state["weight"], 1)
        return {k.removeprefix("ema_of_"): v / weight for k, v in state.items() if k != "weight"}

    def calibrated(self, state: State) -> jax.Array:
        return state["weight"] > 0

    def merge(self, a: State, b: State) -> State:
        return {k: _wider(k)(a[k], b[k]) for k in a}

    def sync(self, state: State, axis_name: str) -> State:
        return {k: _widest(k)(v, axis_name) for k, v in state.items()}


@dataclasses.dataclass(frozen=True, repr=False)
class AmaxHistory(Tracker):
    """Delayed scaling: the largest magnitudes of the last `length` steps, newest first.

    Reads as their maximum, or with `most_recent` as the newest. The history is that of Micikevicius et al., FP8
    Formats for Deep Learning (2022), as Transformer Engine keeps it.

    Until something was measured, `initial` is read if it is given, else the range of the present tensor. A program
    reads the latter in every step, so that it can quantize a tensor only after all of it was measured. With an
    `initial` range it quantizes and measures in one pass, on TPUs where the tensor is computed.

    >>> float(AmaxHistory(length=4, initial=8.0).read({"amax_history": jnp.zeros((4, 1))})["absmax"][0])
    8.0
    """

    length: int = 1024
    most_recent: bool = False
    initial: float | None = None

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"an amax history has at least one step, got {self.length}")
        if self.initial is not None and not (np.isfinite(self.initial) and self.initial > 0):
            raise ValueError(f"an initial range is a positive number, got {self.initial}")

    @property
    def reads_current(self) -> bool:
        return self.initial is None

    def init(self, bounds: Bounds) -> State:
        if set(bounds) != {"absmax"}:
            raise ValueError(f"delayed scaling is symmetric: it takes an absmax, got {sorted(bounds)}")
        return {"amax_history": jnp.zeros((self.length, *bounds["absmax"].shape), jnp.float32)}

    def update(self, state: State, bounds: Bounds) -> State:
        newest = bounds["absmax"].astype(jnp.float32)[None]
        return {"amax_history": jnp.concatenate([newest, state["amax_history"][:-1]])}

    def _read(self, state: State) -> Bounds:
        history = state["amax_history"]
        absmax = history[0] if self.most_recent else jnp.max(history, axis=0)
        return {"absmax": absmax if self.initial is None else jnp.where(absmax == 0, self.initial, absmax)}

    def calibrated(self, state: State) -> jax.Array:
        return self._read(state)["absmax"] != 0 if self.initial is None else jnp.ones((), bool)

    def merge(self, a: State, b: State) -> State:
        return jax.tree.map(jnp.maximum, a, b)

    def sync(self, state: State, axis_name: str) -> State:
        return jax.tree.map(lambda v: jax.lax.pmax(v, axis_name), state)


def widest(bounds: Bounds, axis_names: tuple[str, ...] = ()) -> Bounds:
    """The bounds of all groups together, of the same rank; also over the devices of mapped axes.

    >>> widest({"absmax": jnp.asarray([[1.0], [3.0]])})["absmax"].tolist()
    [[3.0]]
    """
    ends = {"min": jnp.min, "max": jnp.max, "absmax": jnp.max}
    bounds = {k: ends[k](v, keepdims=True) for k, v in bounds.items()}
    return {k: _widest(f"_{k}")(v, axis_names) for k, v in bounds.items()} if axis_names else bounds


def _wider(key: str):
    return jnp.minimum if key.endswith("_min") else jnp.maximum


def _widest(key: str) -> Callable[..., jax.Array]:
    return jax.lax.pmin if key.endswith("_min") else jax.lax.pmax
