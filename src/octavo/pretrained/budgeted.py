"""Mixed precision under a budget: `octavo quantize MODEL int3,int4,int8:gptq OUT --bits 4.5 --data text.txt`."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from octavo.models.fused_weights import FUSED
from octavo.pretrained.calibrated import CalibrationData, float_params
from octavo.pretrained.convert import logits, param_quantizers
from octavo.pretrained.model import PretrainedModel
from octavo.pretrained.names import EMBEDDING, LOGITS
from octavo.pretrained.weight_rules import weight_rules
from octavo.ptq.budget import assign
from octavo.ptq.sensitivity import Option, weight_options
from octavo.rules import QuantizationRule


def budget_options(
    source: PretrainedModel, formats: Sequence[str], data: CalibrationData, *, scale_dtype: str | None = None
) -> dict[str, dict[str, Option]]:
    """The predicted divergence and the size of each weight of the layers in each format, for any number of budgets."""
    if len(formats) < 2:
        raise ValueError(f"--bits chooses between several formats, such as int3,int4,int8; got {','.join(formats)}")
    quantizers = {}
    for name in formats:
        own = param_quantizers(source.config, weight_rules(name, source.config, head="float"), scale_dtype=scale_dtype)
        quantizers[name] = {w: q for w, q in own.items() if w not in (EMBEDDING, LOGITS)}
    run = functools.partial(logits, source.config)
    options = weight_options(run, float_params(source), quantizers, data.batches(source))
    unseen = [weight for weight in quantizers[formats[0]] if weight not in options]
    if unseen:
        raise ValueError(f"--bits needs the inputs of all weights, but those of {unseen[0]!r} cannot be observed")
    return options


def budget_rules(
    source: PretrainedModel,
    options: Mapping[str, Mapping[str, Option]],
    *,
    bits: float,
    head: str = "",
    log: Callable[[str], None] | None = None,
) -> tuple[tuple[QuantizationRule, ...], dict[str, float]]:
    """Rules by which the weights of all layers have at most `bits` bits on average, scales included.

    Args:
      source: The model.
      options: What the formats to choose from cost, by `budget_options`.
      bits: Bits per weight of the layers; the embedding table and the logits are not counted.
      head: The format of the embedding table and the logits.
      log: Called with a line for each weight.

    Returns:
      A rule for each weight, and those of the head; and the predicted divergence by weight.
    """
    values = sum(math.prod(source.leaves[weight].shape) for weight in options)
    chosen = assign(options, int(bits * values / 8), groups=_groups(options))
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
