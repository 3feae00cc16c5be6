"""Converting a pretrained model with calibration data: the method of a recipe such as `int4:gptq`."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo._tree import flatten_paths, unflatten_paths
from octavo.models.fused_weights import FUSED
from octavo.pretrained.convert import logits, pack, param_quantizers, signal_to_noise
from octavo.pretrained.model import PretrainedModel
from octavo.pretrained.names import EMBEDDING
from octavo.pretrained.rounding import check_rounding, train_rounding
from octavo.ptq import Fold, awq, collect_statistics, distill, method_names, quantize_weights
from octavo.qarray import is_qarray
from octavo.rules import QuantizationRule

_ROWS = 8
_TOKENS = 1 << 15
# The weights that read the output of each norm, named as in MaxText.
_READERS = {
    "pre_self_attention_layer_norm": [f"self_attention/{name}" for name in FUSED["query_key_value"]],
    "post_self_attention_layer_norm": [f"mlp/{name}" for name in FUSED["wi"]],
}


@dataclasses.dataclass(frozen=True)
class CalibrationData:
    """The text of a calibration.

    Args:
      text: The text.
      tokens: The number of tokens to use of it, which it must have; by default all, up to 32768.
      length: Tokens in a window; windows are independent.
    """

    text: str
    tokens: int | None = None
    length: int = 256

    def batches(self, source: PretrainedModel) -> list[np.ndarray]:
        """Windows of tokens, several in a batch; what does not fill a window is left out."""
        if source.tokenizer is None:
            raise ValueError(f"{source.name} has no tokenizer: it cannot read a calibration text")
        ids = np.asarray(source.tokenizer.encode(self.text)[: self.tokens or _TOKENS], np.int32)
        count = len(ids) // self.length
        if not count:
            raise ValueError(f"the calibration text has {len(ids)} tokens, less than one window of {self.length}")
        if self.tokens is not None and len(ids) < self.tokens:
            raise ValueError(
                f"the calibration text has {len(ids)} tokens, fewer than the {self.tokens} asked for: pass a longer "
                "text, or ask for fewer"
            )
        windows = ids[: count * self.length].reshape(count, self.length)
        if source.tokenizer.add_bos and source.tokenizer.bos_id is not None:
            windows[:, 0] = source.tokenizer.bos_id
        return np.split(windows, range(_ROWS, count, _ROWS))


def split_method(recipe: str) -> tuple[str, str]:
    """A recipe without its method, and the method or "".

    >>> split_method("int4:g64:gptq"), split_method("int4:mse")
    (('int4:g64', 'gptq'), ('int4:mse', ''))
    """
    head, _, last = recipe.rpartition(":")
    return (head, last) if head and last in (*method_names(), "autoround", "awq", "gptaq") else (recipe, "")


def calibrated_codes(
    source: PretrainedModel,
    rules: Sequence[QuantizationRule],
    data: CalibrationData,
    *,
    method: str,
    scale_dtype: str | None = None,
    log: Callable[[str], None] | None = None,
    progress: Callable[[str], None] | None = None,
    checkpoint: Path | None = None,
) -> dict[str, tuple[Any, float | None]]:
    """Quantize the weights of a model for the inputs that they have on calibration data.

    The embedding table is not among them: it is looked up by row as well. With "awq", weights are scaled against the
    norms before them, and then quantized with searched scales.

    With "autoround", the codes of GPTQ are then trained layer by layer.

    Returns:
      The packed codes and their signal to noise ratio, by path: an argument of `convert_model`. Norms that were
      scaled have no ratio.
    """
    quantizers = param_quantizers(source.config, rules, scale_dtype=scale_dtype)
    batches = data.batches(source)
    if log is not None:
        log(f"calibrating on {sum(batch.size for batch in batches)} tokens")
    params, run = float_params(source), functools.partial(logits, source.config)
    wanted = {name: q for name, q in quantizers.items() if name != EMBEDDING}
    found: dict[str, tuple[Any, float | None]] = {}
    folds = _folds(source.leaves, wanted) if method == "awq" else []
    if folds:
        params, method = awq(run, params, batches, folds, wanted), "search"
    floats = flatten_paths(params)
    found |= {fold.scale: (np.asarray(floats[fold.scale]), None) for fold in folds}
    stages, trains = [], method == "autoround"
    if trains:
        check_rounding(source.config, wanted)
        method = "gptq"
    if method == "gptaq":
        stages, method = _stages(wanted), "gptq"
    options: dict[str, Any] = {"method": method, "stages": stages, "checkpoint": checkpoint}
    options["progress"] = batch_progress(progress, len(batches))
    codes_of = {}
    for path, done in quantize_weights(run, params, wanted, batches, **options):
        codes_of[path] = done.array
        if progress is not None:
            progress(f"quantized {len(codes_of)} of {len(wanted)} weights")
    if trains:
        codes_of = train_rounding(source.config, floats, codes_of, batches, log=log)
    for path, array in codes_of.items():
        codes = array.astype(jnp.float32)
        found[path] = pack(codes, quantizers[path])._map(np.asarray), signal_to_noise(floats[path], codes)
    return found


def batch_progress(progress: Callable[[str], None] | None, count: int) -> Callable[[int], None] | None:
    """What `collect_statistics` calls with the number of batches done, of so many."""
    return None if progress is None else lambda done: progress(f"calibrated on {done} of {count} batches")


def distilled(
    source: PretrainedModel,
    params: dict[str, Any],
    rules: Sequence[QuantizationRule],
    data: CalibrationData,
    *,
    steps: int,
    log: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Converted parameters by path, with scales, norms and biases trained for the outputs of the float model."""
    if any(rule.act_qtype is not None for rule in rules):
        raise ValueError(
            "--distill trains the scales of weights, and these rules quantize activations: train with them"
        )
    batches = data.batches(source)
    batches = [batch for batch in batches if len(batch) == len(batches[0])]
    low = unflatten_paths({path: x._map(jnp.asarray) if is_qarray(x) else x for path, x in params.items()})
    run = functools.partial(logits, source.config)
    trained = flatten_paths(distill(run, float_params(source), low, batches, steps=steps, log=log), is_qarray)
    return {path: x._map(np.asarray) if is_qarray(x := trained[path]) else np.asarray(x) for path in params}


def _stages(names: Iterable[str]) -> list[list[str]]:
    """Weights by layer, and then those of the logits."""
    found: dict[tuple[int, int], list[str]] = {}
    for name in names:
        layer = re.search(r"/(dense_)?layers_(\d+)/", name)
        found.setdefault((0 if layer[1] else 1, int(layer[2])) if layer else (2, 0), []).append(name)
    return [found[layer] for layer in sorted(found)]


def importances(
    source: PretrainedModel, data: CalibrationData, *, log: Callable[[str], None] | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """The mean square of the inputs of each weight of a model, by path: [inputs]; and the number of tokens."""
    batches = data.batches(source)
    tokens = sum(batch.size for batch in batches)
    if log is not None:
        log(f"calibrating on {tokens} tokens")
    found, _ = collect_statistics(
        functools.partial(logits, source.config), float_params(source), batches, hessian=False
    )
    means = {path: np.asarray(one.mean_square[0]) for path, one in found.items() if len(one.mean_square) == 1}
    return means, tokens


def _folds(names: Iterable[str], weights: Collection[str]) -> list[Fold]:
    """The norms of a decoder whose outputs only quantized weights read: not those before routers of experts."""
    found = []
    for name in names:
        layer, _, norm = name.removesuffix("/scale").rpartition("/")
        if norm not in _READERS:
            continue
        readers = tuple(f"{layer}/{reader}/kernel" for reader in _READERS[norm])
        if all(reader in weights for reader in readers):
            found.append(Fold(name, readers))
    if not found:
        raise ValueError("awq scales the norms before attention and MLPs, and this model has none: use gptq")
    return found


def float_params(source: PretrainedModel) -> Any:
    """All parameters of a model in float32."""
    params = source.params("float32")
    return jax.tree.map(lambda x: x.dequantize(jnp.float32) if is_qarray(x) else x, params, is_leaf=is_qarray)
