"""Mixed precision under a budget: `octavo quantize MODEL int3,int4,int8:gptq OUT --bits 4.5 --data text.txt`."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence

from octavo.models.fused_weights import FUSED
from octavo.pretrained.calibrated import CalibrationData, float_params
from octavo.pretrained.convert import logits, param_quantizers
from octavo.pretrained.model import PretrainedModel
from octavo.pretrained.names import EMBEDDING, LOGITS
from octavo.pretrained.weight_rules import weight_rules
from octavo.ptq.budget import assign
from octavo.ptq.sensitivity import weight_options
from octavo.rules import QuantizationRule


def budget_rules(
    source: PretrainedModel,
    formats: Sequence[str],
    data: CalibrationData,
    *,
    bits: float,
    head: str = "",
    scale_dtype: str | None = None,
    log: Callable[[str], None] | None = None,
) -> tuple[QuantizationRule, ...]:
    """Rules by which the weights of all layers have at most `bits` bits on average, scales included.

    Args:
      source: The model.
      formats: The formats to choose from, as for `weight_rules`.
      data: The calibration text.
      bits: Bits per weight of the layers; the embedding table and the logits are not counted.
      head: The format of the embedding table and the logits.
      scale_dtype: The dtype of scales.
      log: Called with a line for each weight.

    Returns:
      A rule for each weight, and those of the head.
    """
    if len(formats) < 2:
        raise ValueError(f"--bits chooses between several formats, such as int3,int4,int8; got {','.join(formats)}")
    own = {name: weight_rules(name, source.config, head="float") for name in formats}
    quantizers = {name: param_quantizers(source.config, rules, scale_dtype=scale_dtype) for name, rules in own.items()}
    quantizers = {
        name: {w: q for w, q in found.items() if w not in (EMBEDDING, LOGITS)} for name, found in quantizers.items()
    }
    run = functools.partial(logits, source.config)
    options = weight_options(run, float_params(source), quantizers, data.batches(source))
    unseen = [weight for weight in quantizers[formats[0]] if weight not in options]
    if unseen:
        raise ValueError(f"--bits needs the inputs of all weights, but those of {unseen[0]!r} cannot be observed")
    values = sum(math.prod(source.leaves[weight].shape) for weight in options)
    chosen = assign(options, int(bits * values / 8), groups=_groups(options))
    width = max(map(len, chosen))
    for weight, name in chosen.items() if log is not None else ():
        costs = "  ".join(f"{other} {option.kl:.2e}" for other, option in options[weight].items())
        log(f"{weight:<{width}}  {name:<6}  predicted KL {costs}")  # pyrefly: ignore
    if log is not None:
        size = sum(options[weight][name].nbytes for weight, name in chosen.items())
        total = sum(options[weight][name].kl for weight, name in chosen.items())
        log(f"layers: {8 * size / values:.3f} bits per weight, predicted KL {total:.4f}")
    heads = weight_rules(formats[0], source.config, head=head)[:-1]
    body = [own[name][-1].replace(module_path=re.escape(weight.rpartition("/")[0])) for weight, name in chosen.items()]
    return (*heads, *body)


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
