"""`LoraProvider`: matmuls with adapters, whose parameters are named after the weight as Qwix names them."""

from typing import Any

import jax
import jax.numpy as jnp

from octavo._typing import Array
from octavo.lora.layout import Layout, adapter_names, weight_side
from octavo.lora.rule import LoraRule
from octavo.ops.products.ragged import NUMBERS as RAGGED
from octavo.transform import PtqProvider
from octavo.transform.frame import Key

PARAMS = "params"
"""The collection of adapters: they are parameters next to the weight, `kernel_lora_a` and `kernel_lora_b`."""


class LoraProvider(PtqProvider):
    """LoRA, and QLoRA where a rule has a `weight_qtype`: adapters are trained, weights are not.

    Args:
      rules: `LoraRule`s, and other rules for matmuls without an adapter.
      disable_jit: Accepted for Qwix.
      **rule_kwargs: The fields of a single `LoraRule`, instead of rules.

    >>> LoraProvider(module_path=".*/query", rank=4, alpha=8.0).rules
    (LoraRule(module_path='.*/query', rank=4, alpha=8.0),)
    """

    rng_stream = "dropout"

    def __init__(self, rules: Any = None, *, disable_jit: bool = False, **rule_kwargs: Any):
        if rules is not None and rule_kwargs:
            raise ValueError("give either rules or the fields of one LoraRule, not both")
        super().__init__([LoraRule(**rule_kwargs)] if rules is None else rules, disable_jit=disable_jit)

    def dot_general(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Array:
        out = super().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)
        return self._adapted(out, lhs, rhs)

    def einsum(self, subscripts: str, lhs: Any, rhs: Any, **kwargs: Any) -> Array:
        return self._adapted(super().einsum(subscripts, lhs, rhs, **kwargs), lhs, rhs)

    def conv_general_dilated(self, lhs: Any, rhs: Any, window_strides: Any, padding: Any, **geometry: Any) -> Array:
        out = super().conv_general_dilated(lhs, rhs, window_strides, padding, **geometry)
        numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, geometry.get("dimension_numbers"))
        grouped = geometry.get("feature_group_count", 1) != 1 or geometry.get("batch_group_count", 1) != 1
        if grouped or numbers.rhs_spec[0] != rhs.ndim - 1 or numbers.out_spec[1] != out.ndim - 1:
            raise ValueError(
                f"{self._where()}: an adapter of a convolution needs its features last and no groups; exempt it by an "
                "earlier rule with skip=True"
            )
        found = self._adapter(lhs)
        if found is None:
            return out
        x, a, b, scale = found
        hidden = jax.lax.conv_general_dilated(x, a, window_strides, padding, **geometry)
        return out + (hidden @ b.astype(hidden.dtype) * scale).astype(out.dtype)

    def ragged_dot(self, lhs: Any, rhs: Any, group_sizes: Any, **kwargs: Any) -> Array:
        out = super().ragged_dot(lhs, rhs, group_sizes, **kwargs)
        if (found := self._adapter(lhs)) is None:
            return out
        x, a, b, scale = found
        if kwargs.get("dimension_numbers") not in (None, RAGGED) or kwargs.get("sharding") is not None:
            raise ValueError(
                f"{self._where()}: an adapter of a grouped matmul needs groups along the rows, on one device; exempt "
                "it by an earlier rule with skip=True"
            )
        hidden = jax.lax.ragged_dot(x, a, group_sizes)
        return out + (jax.lax.ragged_dot(hidden, b, group_sizes) * scale).astype(out.dtype)

    def gmm(self, lhs: Any, rhs: Any, group_sizes: Any, **kwargs: Any) -> Array:
        return LoraProvider.ragged_dot(self, lhs, rhs, group_sizes, **kwargs)

    def _where(self) -> str:
        site = self.operation.site
        return f"{site.op_id} at {site.path!r}"

    def _adapted(self, out: Array, lhs: Any, rhs: Any) -> Array:
        """The result of a dot with that of its adapter added."""
        site = self.operation.site
        side = weight_side(site)
        if (found := self._adapter(rhs if side == 0 else lhs)) is None:
            return out
        x, a, b, scale = found
        layout = Layout.of(site)
        contract, batch = site.params["dimension_numbers"]
        a, b = layout.canonical(a, b)
        n, m = len(layout.batch), len(layout.contracting)
        leading = tuple(range(n))
        hidden = jax.lax.dot_general(x, a, ((contract[1 - side], tuple(range(n, n + m))), (batch[1 - side], leading)))
        batched = () if layout.keeps_axes else leading
        delta = jax.lax.dot_general(hidden, b, (((hidden.ndim - 1,), (len(batched),)), (batched, batched)))
        if side == 0:  # the weight's axes come before those of the activation
            rows, columns = x.ndim - n - m, len(layout.rest)
            order = (*leading, *range(n + rows, n + rows + columns), *range(n, n + rows))
            delta = delta.transpose(order)
        return out + (delta * scale).astype(out.dtype)

    def _adapter(self, x: Array) -> tuple[Array, Array, Array, float] | None:
        """The input of the adapter, a, b and the factor; None if the operation has none."""
        site, frame = self.operation
        rule = site.rule
        if not isinstance(rule, LoraRule) or not site.is_adapted:
            return None
        layout, (path, *names) = Layout.of(site), adapter_names(site)
        if rule.rank > layout.max_rank:
            raise ValueError(
                f"{self._where()}: rank={rule.rank} is more than the rank of its {layout.shape} weight "
                f"{site.leaf!r}, {layout.max_rank}: choose a smaller rank or exempt it by an earlier rule"
            )
        dtype = frame.context.dtypes.get(site.leaf or "", x.dtype)
        made = zip(names, layout.shapes(rule.rank), (rule.lora_a_initializer, rule.lora_b_initializer), strict=True)
        a, b = (self._parameter(path, name, shape, init, dtype) for name, shape, init in made)
        key = frame.key_of(site.path, site.op_id, "dropout")
        if rule.dropout > 0 and key is not None:
            kept = jax.random.bernoulli(key, 1 - rule.dropout, x.shape)
            x = jnp.where(kept, x / (1 - rule.dropout), jnp.zeros_like(x))
        return x, a.astype(x.dtype), b.astype(x.dtype), rule.scale

    def _parameter(self, path: str, name: str, shape: tuple[int, ...], init: Any, dtype: Any) -> Array:
        frame = self.operation.frame

        def make() -> Array:
            key = frame.key_of(path, name)
            return init(jax.random.key(0) if key is None else key, shape, dtype)

        found = frame.read(Key(PARAMS, path, name), make)
        if tuple(found.shape) != shape:
            raise ValueError(
                f"{self._where()}: {name!r} has the shape {tuple(found.shape)}, but this matmul and rank need {shape}: "
                "the adapter is of another model or rank, or the weight is used in two ways"
            )
        return found
