"""Low-rank adapters (LoRA) by rule, on weights in float or in low precision (QLoRA).

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; T. Dettmers et al., "QLoRA: Efficient
Finetuning of Quantized LLMs", 2023: y = x w + (alpha / rank) (x a) b, with w frozen.
"""

from octavo.lora.api import Adapted, Merged, adapted, apply_lora_to_model, merge_weight, split_adapters, weight_deltas
from octavo.lora.provider import LoraProvider
from octavo.lora.rule import LoraRule

__all__ = [
    "Adapted",
    "LoraProvider",
    "LoraRule",
    "Merged",
    "adapted",
    "apply_lora_to_model",
    "merge_weight",
    "split_adapters",
    "weight_deltas",
]
