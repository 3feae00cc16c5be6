"""Mixed precision under a budget: `octavo quantize MODEL mixed:gptq OUT --bits 4.5 --data text.txt`."""

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from octavo.models.fused_weights import FUSED
from octavo.pretrained.calibrated import CalibrationData, batch_progress, float_params
from octavo.pretrained.convert import logits, param_quantizers
from octavo.pretrained.model import PretrainedModel
from octavo.pretrained.names import EMBEDDING, LOGITS
from octavo.pretrained.weight_rules import weight_rules
from octavo.ptq.budget import assign
from octavo.ptq.sensitivity import Option, weight_options
from octavo.rules import QuantizationRule

MIXED = "mixed"
"""The name of the formats with the least errors, of 3.5 to 8 bits."""

_FORMATS = (*(f"int{bits}_double:minmax" for bits in (3, 4, 5, 6)), "int8")
_HUNDREDTH = 0.005
"""Budgets are met to two decimals: a scale of each output adds 0.0002 bits to formats of 4.5 bits."""
_GAIN = 0.03
"""Predictions are about 13 % off for a weight. A mixture that gains less by them than this share is left alone."""


def budget_formats(recipe: str) -> list[str]:
    """The formats of a recipe without its method.

    >>> budget_formats("int3,int8"), budget_formats("mixed")[0]
    (['int3', 'int8'], 'int3_double:minmax')
    """
    return list(_FORMATS) if recipe == MIXED else recipe.split(",")


def budget_options(
    source: PretrainedModel,
    formats: Sequence[str],
    data: CalibrationData,
    *,
    scale_dtype: str | None = None,
    progress: Callable[[str], None] | None = None,
    checkpoint: Path | None = None,
) -> dict[str, dict[str, Option]]:
    """The predicted divergence and the size of each weight of the layers in each format, for any number of budgets."""
    if len(formats) < 2:
        raise ValueError(
            f"a budget chooses between several formats, such as int3,int4,int8 or {MIXED}; got {','.join(formats)}"
        )
    quantizers = {}
    for name in formats:
        own = param_quantizers(source.config, weight_rules(name, source.config, head="float"), scale_dtype=scale_dtype)
        quantizers[name] = {w: q for w, q in own.items() if w not in (EMBEDDING, LOGITS)}
    run = functools.partial(logits, source.config)
    batches = data.batches(source)
    kept = {"progress": batch_progress(progress, len(batches)), "checkpoint": checkpoint}
    options = weight_options(run, float_params(source), quantizers, batches, **kept)
    unseen = [weight for weight in quantizers[formats[0]] if weight not in options]
    if unseen:
        raise ValueError(f"a budget needs the inputs of all weights, but those of {unseen[0]!r} cannot be observed")
    return options


def budget_rules(
    source: PretrainedModel,
    options: Mapping[str, Mapping[str, Option]],
    *,
    bits: float | None = None,
    mebibytes: float | None = None,
    head: str = "",
    scale_dtype: str | None = None,
    log: Callable[[str], None] | None = None,
) -> tuple[tuple[QuantizationRule, ...], dict[str, float]]:
    """Rules by which the weights of all layers fit a budget, scales included, with the least predicted divergence.

    Args:
      source: The model.
      options: What the formats to choose from cost, by `budget_options`.
      bits: Bits per weight of the layers on average; the embedding table and the logits are not counted.
      mebibytes: Instead, the size of all parameters in MiB.
      head: The format of the embedding table and the logits.
      scale_dtype: The dtype of scales, for formats that do not define one.
      log: Called with a line for each weight.

    Returns:
      A rule for each weight, and those of the head; and the predicted divergence by weight.
    """
    values = sum(math.prod(source.leaves[weight].shape) for weight in options)
    if bits is not None:
        budget = int((bits + _HUNDREDTH) * values / 8)
    else:
        assert mebibytes is not None
        others = _other_bytes(source, options, head=head, scale_dtype=scale_dtype)
        budget = int(mebibytes * 2**20) - others
        if budget <= 0:
            raise ValueError(f"{mebibytes:g} MiB are too few: the head and norms alone need {others / 2**20:.2g} MiB")
    chosen = _assign(options, budget)
    costs = {weight: options[weight][name].kl for weight, name in chosen.items()}
    if log is not None:
        width = max(map(len, chosen))
        for weight, name in chosen.items():
            others = "  ".join(f"{other} {option.kl:.2e}" for other, option in options[weight].items())
            log(f"{weight:<{width}}  {name:<6}  predicted KL {others}")
        size = sum(options[weight][name].nbytes for weight, name in chosen.items())
        log(f"layers: {8 * size / values:.3f} bits per weight, predicted KL {sum(costs.values()):.4f}")
    own = {name: weight_rules(name, source.config, head=head) for name in {*chosen.values()}}
    body = [own[name][-1].replace(module_path=re.escape(weight.rpartition("/")[0])) for weight, name in chosen.items()]
    return (*next(iter(own.values()))[:-1], *body), costs


def _assign(options: Mapping[str, Mapping[str, Option]], budget: int) -> dict[str, str]:
    """The format of each weight; one format for all where a mixture of formats gains next to nothing."""
    chosen = assign(options, budget, groups=_groups(options))

    def total(names: Mapping[str, str]) -> Option:
        own = [options[weight][name] for weight, name in names.items()]
        return Option(sum(o.kl for o in own), sum(o.nbytes for o in own))

    uniform = [dict.fromkeys(options, name) for name in next(iter(options.values()))]
    fits = [names for names in uniform if total(names).nbytes <= budget]
    best = min(fits, key=lambda names: total(names).kl, default=chosen)
    return best if total(best).kl * (1 - _GAIN) <= total(chosen).kl else chosen


def _other_bytes(source: PretrainedModel, weights: Collection[str], *, head: str, scale_dtype: str | None) -> int:
    """The bytes of all parameters but these weights."""
    rules = weight_rules("int4", source.config, head=head)
    quantizers = param_quantizers(source.config, rules, scale_dtype=scale_dtype)
    others = {path: leaf for path, leaf in source.leaves.items() if path not in weights}
    sizes = [
        quantizers[path].bits_per_value(leaf.shape) * math.prod(leaf.shape) / 8 if path in quantizers else leaf.nbytes
        for path, leaf in others.items()
    ]
    return round(sum(sizes))


def _groups(weights: Iterable[str]) -> list[list[str]]:
    """Weights that must agree, by the names of MaxText."""
    found: dict[tuple[str, str], list[str]] = {}
    for weight in weights:
        module, _, _ = weight.rpartition("/")
        parent, _, own = module.rpartition("/")
        for fused, names in FUSED.items():
            if own in names:
                found.setdefault((parent, fused), []).append(weight)
    return list(found.values())
