"""How many parameters a model has, from its configuration alone."""

from octavo.train.config import Config


def parameter_count(config: Config, vocab_size: int = 0, *, active: bool = False) -> int:
    """The count of all parameters, or with `active` of those that one token meets.

    `vocab_size` is the tokenizer's, for a configuration that leaves it open.

    >>> from octavo.train.sources import load
    >>> f"{parameter_count(load(['model_name=llama-1b'], environ={}).config):,}"
    '1,235,814,400'
    """
    vocabulary = config.vocab_size or vocab_size
    if vocabulary < 1:
        raise ValueError("vocab_size=0 leaves the vocabulary to the tokenizer: pass its vocab_size")
    width, heads = config.base_emb_dim, 2 * (config.base_num_query_heads + config.base_num_kv_heads)
    tables = vocabulary * width * (1 if config.logits_via_embedding else 2)
    common = width * config.head_dim * heads + 2 * width
    dense_layers = config.base_num_decoder_layers if config.num_experts == 1 else config.first_num_dense_layers
    moe_layers = config.base_num_decoder_layers - dense_layers
    met = config.num_experts_per_tok if active else config.num_experts
    expert = 3 * width * (config.base_moe_mlp_dim or config.base_mlp_dim)
    experts = width * config.num_experts + expert * (met + config.shared_experts)
    return tables + width + dense_layers * (common + 3 * width * config.base_mlp_dim) + moe_layers * (common + experts)
