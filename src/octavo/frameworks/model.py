"""`quantize_model` and `plan` for models of any framework."""

import sys
from collections.abc import Sequence
from typing import Any, overload

from octavo.frameworks.schedule import ScheduledLinen, ScheduledModel, ScheduledNnx
from octavo.inspect import Plan
from octavo.inspect import plan as plan_function
from octavo.inspect.plan import plan_of
from octavo.rules.schedule import Schedule
from octavo.transform import QtProvider, QuantizationProvider


def framework_of(model: Any) -> str | None:
    """ "linen", "nnx" or "equinox"; None for anything else."""
    for name, module in (("linen", "flax.linen"), ("nnx", "flax.nnx"), ("equinox", "equinox")):
        # A model's framework is imported already.
        if module in sys.modules and isinstance(model, sys.modules[module].Module):
            return name
    return None


def _provider(rules: Any) -> QuantizationProvider:
    return rules if isinstance(rules, QuantizationProvider) else QtProvider(rules)


def _given(rules: Any) -> QuantizationProvider:
    """The provider of these rules, of which there must be some."""
    provider = _provider(rules)
    if not provider.rules and provider is not rules:
        raise ValueError("there are no rules, so nothing would be quantized: give the name of a recipe, or rules")
    return provider


@overload
def quantize_model(
    model: Any, provider: Schedule, *model_inputs: Any, methods: Sequence[str] | None = None, **kwargs: Any
) -> ScheduledModel: ...


@overload
def quantize_model[M](
    model: M, provider: Any, *model_inputs: Any, methods: Sequence[str] | None = None, **kwargs: Any
) -> M: ...


def quantize_model(
    model: Any, provider: Any, *model_inputs: Any, methods: Sequence[str] | None = None, **kwargs: Any
) -> Any:
    """Quantize the matmuls of a Flax Linen, Flax NNX or Equinox model.

    All public methods of the model are quantized. The given model is unchanged, and no weights are copied.

    Args:
      model: The model.
      provider: A provider, a rule or several, or the name of a recipe; or a `Schedule`.
      *model_inputs: Example inputs, of which only the shapes matter. Linen models take none. NNX models need them if
        the rules keep state or the provider quantizes parameters, Equinox models in the latter case.
      methods: For a Linen model, the methods to quantize; for an NNX or Equinox model, those that the inputs are for.
      **kwargs: Example inputs by keyword.

    Returns:
      A model of the same kind; for a `Schedule`, a `ScheduledModel`, whose `at(step)` is the model of a step.

    >>> import flax.linen as nn, jax, octavo
    >>> model = octavo.quantize_model(nn.Dense(4), octavo.QtRule(weight_qtype="int8", act_qtype="int8"))
    >>> model.init_with_output(jax.random.key(0), jax.numpy.ones((2, 8)))[0].shape
    (2, 4)
    """
    framework = framework_of(model)
    if framework == "linen":
        from octavo.frameworks.linen import quantize_linen

        if model_inputs or kwargs:
            raise ValueError("a Linen model is quantized without inputs: they come with init and apply")
        if isinstance(provider, Schedule):
            return ScheduledLinen(model, provider, methods)
        return quantize_linen(model, _given(provider), methods=methods)
    if framework == "nnx" and isinstance(provider, Schedule):
        return ScheduledNnx(model, provider, model_inputs, methods, **kwargs)
    if framework == "nnx":
        from octavo.frameworks.nnx import quantize_nnx

        return quantize_nnx(model, _given(provider), *model_inputs, methods=methods, **kwargs)
    if framework == "equinox" and isinstance(provider, Schedule):
        raise TypeError(
            "an Equinox module is trained as a pytree, so a schedule goes with a function of it: "
            "octavo.scheduled(lambda model, x: model(x), schedule)"
        )
    if framework == "equinox":
        from octavo.frameworks.equinox import quantize_equinox

        return quantize_equinox(model, _given(provider), *model_inputs, methods=methods, **kwargs)
    raise TypeError(
        f"quantize_model takes a Flax Linen, Flax NNX or Equinox module, got {type(model).__name__}; any function is "
        "quantized by octavo.quantized(fn, rules)"
    )


def plan(model: Any, rules: Any, *args: Any, on_unmatched: str = "error", weights: Any = None, **kwargs: Any) -> Plan:
    """List what the rules do to each matmul of a function or model, without running it.

    Args:
      model: A function, or a model of Flax Linen, Flax NNX or Equinox. The variables of a Linen model are made from
        its shapes.
      rules: A provider, a rule or several, or the name of a recipe.
      *args: Arguments of the function or inputs of the model: arrays or `jax.ShapeDtypeStruct`s.
      on_unmatched: What to do about a rule that matches nothing, or only what earlier rules match: "error", "warn" or
        "ignore". The message names the nearest paths.
      weights: Which arguments of a function hold weights, as in `quantized`.
      **kwargs: Arguments by keyword.

    Returns:
      A plan, which prints as a table and has `rows` and `to_json`.

    >>> import jax, jax.numpy as jnp, octavo
    >>> x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 64), (64, 16)))
    >>> rule = octavo.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    >>> print(octavo.plan(lambda params, x: x @ params["w"], rule, {"w": w}, x).rows[0].drhs)
    int8 x int8
    """
    framework = framework_of(model)
    if framework is None:
        return plan_function(model, rules, *args, on_unmatched=on_unmatched, weights=weights, **kwargs)
    if framework == "linen":
        from octavo.frameworks.linen import linen_sites as sites
    elif framework == "nnx":
        from octavo.frameworks.nnx import nnx_sites as sites
    else:
        from octavo.frameworks.equinox import equinox_sites as sites
    provider = _provider(rules)
    return plan_of(sites(model, provider, *args, **kwargs), provider.rules, on_unmatched)
