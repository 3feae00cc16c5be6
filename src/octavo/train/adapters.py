"""LoRA in the trainer: adapters are trained, and the weights are frozen, in float or in low precision."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from octavo._tree import flatten_paths, path_str, unflatten_paths
from octavo.lora import LoraProvider, LoraRule
from octavo.lora.loftq import loftq, quantize_as
from octavo.numerics import get_format
from octavo.ptq import collect_statistics
from octavo.ptq.api import MEMORY, passes_over
from octavo.qarray import QArray
from octavo.train.config import Config, ConfigError
from octavo.train.config.checks import SOURCE
from octavo.transform import quantized


def lora_rule(config: Config) -> LoraRule | None:
    """The rule of a configuration's adapters; None without.

    >>> lora_rule(Config(load_parameters_path="model.gguf", lora_rank=8, lora_weight_qtype="nf4")).tile_size
    64
    """
    if not config.lora_rank:
        return None
    qtype = None if config.lora_weight_qtype in ("", SOURCE) else config.lora_weight_qtype
    has_tiles = qtype is not None and get_format(qtype).tile is None and config.lora_tile_size
    return LoraRule(
        module_path=config.lora_module_path,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        weight_qtype=qtype,
        tile_size=config.lora_tile_size if has_tiles else None,
        scope="weights",
    )


class AdapterLoss:
    """A loss as a function of (adapters, frozen weights), in the form that a training step takes.

    Args:
      loss: The loss as a function of the parameters and further arguments.
      rule: Which matmuls have an adapter.
      pack: Whether frozen codes of fewer than eight bits are packed into bytes.
    """

    def __init__(self, loss: Callable[..., Any], rule: LoraRule, *, pack: bool = True):
        self.loss, self.rule, self.pack = loss, rule, pack
        self.low = quantized(loss, LoraProvider([rule]), weights="params")

    def init_adapters(self, key: jax.Array, params: Any, *args: Any) -> dict[str, Any]:
        """New adapters for these parameters."""
        return self.low.init_random(key, params, *args)["params"]

    def init_loftq(self, params: Any, *args: Any) -> tuple[dict[str, Any], Any]:
        """Adapters that make up for the quantization of their weights, and the parameters as they are kept."""
        quantizers = self.low.stored_quantizers(params, *args)
        adapters, low = loftq(self.low.sites(params, *args), params, quantizers, steps=4)
        return adapters, self._place(low, params)

    def init_calibrated(
        self,
        key: jax.Array,
        params: Any,
        batches: Sequence[tuple[Any, ...]],
        *,
        eora: bool,
        memory: int = MEMORY,
    ) -> tuple[dict[str, Any], Any]:
        """Adapters, and GPTQ's codes of their weights for the inputs that these have on batches.

        Args:
          key: Makes adapters that begin without effect.
          params: The parameters, in float.
          batches: The other arguments of the loss, for each batch.
          eora: Whether adapters make up for what GPTQ leaves instead (EoRA).
          memory: Bytes of Hessians that are held at a time; if those of all weights need more, there are several passes
            over the batches.
        """
        quantizers, leaves = self.low.stored_quantizers(params, *batches[0]), flatten_paths(params)
        sites = self.low.sites(params, *batches[0])
        adapters: dict[str, Any] = {}
        low: dict[str, QArray] = {}
        for names in passes_over(quantizers, {name: leaves[name].shape for name in quantizers}, memory):
            statistics, missing = collect_statistics(self.loss, params, batches, only=names)
            if missing:
                name, reason = next(iter(missing.items()))
                raise ConfigError([f"{name} cannot be calibrated: {reason}; leave it out of lora_module_path"])
            if eora:
                own = [site for site in sites if site.leaf in names]
                found = loftq(own, params, quantizers, steps=1, statistics=statistics, method="gptq")
                adapters |= flatten_paths(found[0])
                low |= found[1]
                continue
            for name in names:
                low[name] = quantize_as(quantizers[name], leaves[name], statistics[name], "gptq")(leaves[name])
        made = unflatten_paths(adapters) if eora else self.init_adapters(key, params, *batches[0])
        return made, self._place(low, params)

    def freeze(self, params: Any, *args: Any) -> Any:
        """The parameters as they are kept: those with an adapter in the format of the rule."""
        quantizers, leaves = self.low.stored_quantizers(params, *args), flatten_paths(params)
        return self._place({path: q.quantize(leaves[path]) for path, q in quantizers.items()}, params)

    def _place(self, low: Mapping[str, QArray], params: Any) -> Any:
        def place(path: Any, leaf: Any) -> Any:
            codes = low.get(path_str(path))
            return leaf if codes is None else codes.pack() if self.pack else codes

        return jax.tree_util.tree_map_with_path(place, params)

    def stateful(
        self, state: Mapping[str, Any] | None = None, *, step: Any, key: Any = None, update: bool = True
    ) -> Callable[..., Any]:
        """The loss at a step; without `update`, as in evaluation, there is no dropout."""
        del state, step

        def call(operands: tuple[Any, Any], *args: Any) -> tuple[Any, dict[str, Any]]:
            adapters, frozen = operands
            run = self.low.stateful({"params": adapters}, key=key if update and self.rule.dropout else None)
            return run(frozen, *args)[0], {}

        return call
