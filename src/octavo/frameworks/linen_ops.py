"""Quantized operations that Flax Linen layers take as arguments, each with a config, or with rules by layer path."""

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from octavo import ops
from octavo._typing import Array
from octavo.calibration import RunningMean, Tracker, widest
from octavo.frameworks.linen_state import boxed
from octavo.ops import DotConfig, Operand
from octavo.ops.operands import ArrayOrQArray
from octavo.qarray import Quantizer
from octavo.rules import QuantizationRule, dot_config, find
from octavo.transform.site import operand_axes
from octavo.transform.state import GRADIENT_STATE, QUANT_STATS

FROZEN = "aqt"
"""The collection of weights that mode "convert" stores, as in AQT."""


class _LinenOp(nn.Module):
    """The base of the operations: config, static ranges, state of delayed scaling, and PRNG keys.

    Delayed scaling keeps its state in the collection "_overwrite_with_gradient", where its gradient is its new value.
    Stochastic rounding of gradients takes the PRNG stream "stochastic_rounding".

    Attributes:
      config: A `DotConfig`; or rules, of which the first whose `module_path` matches the path of the layer applies; or
        None for float.
      static: Which operands have a static range in the collection "quant_stats": the activation (True or "lhs"), the
        weight ("rhs": its scales are frozen, its values are not), "both", or none (False). The range is updated while
        the collection is mutable.
      quant_mode: "convert" quantizes the right operand once and stores it in the collection "aqt", as
        {"qrhs": {"frozen": QArray}}; "serve" multiplies what is stored there, whatever the right operand is. Other
        modes quantize at every call.
      mesh_axes: The names of the axes of the right operand, which the stored codes and scales of "serve" get.
      replicate_scale: Whether stored scales have no sharded axes.
      tracker: How static ranges of several steps are combined: their mean, or for a moving average `Ema(decay)`.
    """

    config: DotConfig | tuple[QuantizationRule, ...] | None = None
    static: bool | str = False
    quant_mode: str = "train"
    mesh_axes: tuple[str | None, ...] = ()
    replicate_scale: bool = False
    tracker: Tracker = RunningMean()

    def _config_of(self, op: str) -> DotConfig | None:
        if self.config is None or isinstance(self.config, DotConfig):
            return self.config
        rule = find(self.config, "/".join(map(str, self.path[:-1])), op, weights=True)
        return None if rule is None else dot_config(rule, lhs_weight=False, rhs_weight=True)

    def _weight(self, operand: Operand | None, rhs: Array, axes: dict[str, Any]) -> ArrayOrQArray:
        """The right operand; its codes if they are stored."""
        if operand is None or self.quant_mode not in ("convert", "serve"):
            return rhs
        quantizer = operand.quantizer(rhs.ndim, **axes)
        if self.quant_mode == "convert":
            q = quantizer.quantize(rhs)
            self.variable(FROZEN, "qrhs", dict).value = {"frozen": q}
            return q
        if not self.is_initializing() and not self.has_variable(FROZEN, "qrhs"):
            raise ValueError(
                f"{'/'.join(self.path)!r} serves codes of the collection {FROZEN!r}, which was not given: apply the "
                f"model in mode 'convert' with mutable={FROZEN!r} first, and pass what it returns"
            )

        def init() -> Any:
            q = quantizer.quantize(rhs)
            names = (*[None] * (rhs.ndim - len(self.mesh_axes)), *self.mesh_axes)
            box = nn.LogicallyPartitioned(rhs, names)
            return {"frozen": boxed(q, box, replicate_scale=self.replicate_scale) if self.mesh_axes else q}

        return meta.unbox(self.variable(FROZEN, "qrhs", init).value)["frozen"]

    def _key(self) -> Array | None:
        return self.make_rng("stochastic_rounding") if self.has_rng("stochastic_rounding") else None

    def _scaling(
        self, config: DotConfig, operands: tuple[Array, Array], params: dict[str, Any], product: Any
    ) -> dict[str, Any]:
        """The ranges and the state of a matmul with the parameters of a JAX primitive."""
        sides = {False: (), True: ("lhs",), "lhs": ("lhs",), "rhs": ("rhs",), "both": ("lhs", "rhs")}
        if self.static not in sides:
            raise ValueError(f"static is True, False, 'lhs', 'rhs' or 'both', got {self.static!r}")
        scaling: dict[str, Any] = {}
        if config.tracked:
            scaling |= self._own_state(lambda: ops.init_scaling(config, *operands, product))
        axes = operand_axes(params, operands[0].shape, operands[1].shape)
        for side in sides[self.static]:
            operand, number = getattr(config.fwd, side), ("lhs", "rhs").index(side)
            if operand is not None:
                x = operands[number]
                scaling[side] = self._static_range(side, operand.quantizer(x.ndim, **axes[number]), x)
        return scaling

    def _own_state(self, init: Callable[[], Any]) -> dict[str, Any]:
        """The tracker state of one matmul. Two cannot share it: JAX would sum their gradients, which are new states."""
        if self.is_initializing() and self.has_variable(GRADIENT_STATE, "scaling"):
            raise ValueError(
                f"{type(self).__name__} at {'/'.join(self.path)!r} is used by two matmuls, but delayed scaling keeps "
                "the state of one: give each layer an operation of its own (dot_general_cls=, not one dot_general= for "
                f"all), and in nn.scan and nn.vmap give the state an axis, variable_axes={{{GRADIENT_STATE!r}: 0}}"
            )
        return self.variable(GRADIENT_STATE, "scaling", init).value

    def _static_range(self, side: str, quantizer: Quantizer, x: Array) -> dict[str, Array]:
        measured = {k: v.astype(jnp.float32) for k, v in quantizer.measure(jax.lax.stop_gradient(x)).items()}
        if side == "lhs":
            # One range per activation, for batches of any size; a weight has the same shape in every step.
            measured = widest(measured)
        tracker = self.tracker
        stat = self.variable(QUANT_STATS, side, tracker.init, measured)
        if self.is_initializing():
            return measured
        if not self.is_mutable_collection(QUANT_STATS):
            return tracker.read(stat.value)
        stat.value = tracker.update(stat.value, measured)
        return tracker.read(stat.value, measured)


class DotGeneral(_LinenOp):
    """Quantized `jax.lax.dot_general`, for layers that take a `dot_general` or a `dot_general_cls`.

    >>> import functools
    >>> dense = nn.Dense(4, dot_general_cls=functools.partial(DotGeneral, DotConfig.qt("int8")))
    >>> jax.jit(dense.init_with_output)(jax.random.key(0), jnp.ones((2, 8)))[0].shape
    (2, 4)
    """

    @nn.compact
    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> Array:
        kinds = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        config = self._config_of("dot_general")
        if config is None:
            return jax.lax.dot_general(lhs, rhs, dimension_numbers, **kinds)
        params = {"dimension_numbers": dimension_numbers}
        scaling = self._scaling(config, (lhs, rhs), params, dimension_numbers)
        weight = self._weight(config.fwd.rhs, rhs, operand_axes(params, lhs.shape, rhs.shape)[1])
        return ops.dot_general(lhs, weight, dimension_numbers, **kinds, config=config, key=self._key(), scaling=scaling)


class Einsum(_LinenOp):
    """Quantized `jax.numpy.einsum`, for layers that take an einsum.

    Each contraction of two operands is a `dot` with its own ranges, named "product0", "product1", ...

    >>> model = Einsum(DotConfig.qt("int8"))
    >>> run = jax.jit(model.init_with_output, static_argnums=1)
    >>> run(jax.random.key(0), "bi,io->bo", jnp.ones((2, 8)), jnp.ones((8, 4)))[0].shape
    (2, 4)
    """

    dot: ClassVar[type[DotGeneral]] = DotGeneral
    dot_name: ClassVar[str] = "product{}"

    @nn.compact
    def __call__(self, subscripts: str, *operands: Array, **kwargs: Any) -> Array:
        config = self._config_of("einsum")
        if config is None:
            return jnp.einsum(subscripts, *operands, **kwargs)

        def product(lhs: Array, rhs: Array, numbers: Any, *, step: int, **kinds: Any) -> Array:
            fields = (config, self.static, self.quant_mode, self.mesh_axes, self.replicate_scale, self.tracker)
            return self.dot(*fields, name=self.dot_name.format(step))(lhs, rhs, numbers, **kinds)

        return ops.pairwise(product, subscripts, *operands, **kwargs)


class ConvGeneralDilated(_LinenOp):
    """Quantized `jax.lax.conv_general_dilated`, for layers that take a `conv_general_dilated_cls`.

    >>> import functools
    >>> conv = nn.Conv(4, (3, 3), conv_general_dilated_cls=functools.partial(ConvGeneralDilated, DotConfig.qt("int8")))
    >>> jax.jit(conv.init_with_output)(jax.random.key(0), jnp.ones((1, 8, 8, 2)))[0].shape
    (1, 8, 8, 4)
    """

    @nn.compact
    def __call__(self, lhs: Array, rhs: Array, window_strides: Any, padding: Any, **kwargs: Any) -> Array:
        config = self._config_of("conv_general_dilated")
        if config is None:
            return jax.lax.conv_general_dilated(lhs, rhs, window_strides, padding, **kwargs)
        names = ("lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count", "batch_group_count")
        shape = {k: v for k, v in kwargs.items() if k in names}
        dims = ops.ConvDims.of(lhs.shape, rhs.shape, window_strides, padding, **shape)
        params = {"window_strides": window_strides, **shape}
        scaling = self._scaling(config, (lhs, rhs), params, ops.Conv(dims))
        weight = self._weight(config.fwd.rhs, rhs, operand_axes(params, lhs.shape, rhs.shape)[1])
        return ops.conv_general_dilated(
            lhs, weight, window_strides, padding, **kwargs, config=config, key=self._key(), scaling=scaling
        )
