import pytest

from octavo._config import Config
from octavo.models import ModelConfig
from tests.models.common import DENSE, LATENT, MOE

WRONG = [
    (DENSE, {"emb_dim": 0}, "emb_dim is at least 1, got 0"),
    (DENSE, {"unscanned_first": -1}, "unscanned_first is at least 0, got -1"),
    (DENSE, {"norm_eps": 0.0}, "norm_eps is positive, got 0.0"),
    (DENSE, {"num_kv_heads": 3}, "num_query_heads=4 is no multiple of num_kv_heads=3"),
    (DENSE, {"head_dim": 7}, "head_dim is even, because rotary embeddings rotate pairs of values; got 7"),
    (DENSE, {"activation": "sliu"}, "unknown activation 'sliu'.*silu"),
    (DENSE, {"remat": "minmal"}, "unknown remat 'minmal'.*minimal"),
    (DENSE, {"dtype": "bf16"}, "unknown dtype 'bf16'.*bfloat16"),
    (DENSE, {"weight_dtype": "int8"}, "unknown weight_dtype 'int8'"),
    (DENSE, {"shared_experts": 1}, "shared_experts=1 needs num_experts above 1"),
    (DENSE, {"first_dense_layers": 1}, "first_dense_layers=1 needs num_experts above 1"),
    (MOE, {"experts_per_token": 5}, "experts_per_token=5 is more than there are: num_experts=4"),
    (MOE, {"moe_mlp_dim": 0}, "num_experts=4 needs moe_mlp_dim"),
    (MOE, {"first_dense_layers": 3}, "first_dense_layers=3 leaves no layer with experts: num_layers=2"),
    (DENSE, {"v_head_dim": 8}, "v_head_dim=8 needs kv_lora_rank: it is of latent attention"),
    (DENSE, {"router_bias": True}, "router_bias=True needs num_experts above 1"),
    (LATENT, {"v_head_dim": 0}, "kv_lora_rank needs v_head_dim"),
    (LATENT, {"qk_norm": True}, "qk_norm is not supported with latent attention"),
    (LATENT, {"num_kv_heads": 2}, "num_kv_heads=2 differs from num_query_heads=4"),
    (LATENT, {"router_groups": 3}, "num_experts=8 are 3 equal groups"),
    (LATENT, {"experts_per_token": 5}, "groups of 2 experts, router_top_groups=2 of them, are too small"),
    (LATENT, {"router_scores": "tanh"}, "unknown router_scores 'tanh'.*sigmoid"),
    (LATENT, {"router_scale": 0.0}, "router_scale is positive, got 0.0"),
    (DENSE, {"layer_embed_dim": 8, "scan_layers": True}, "layer_embed_dim makes layers differ: set scan_layers=False"),
    (DENSE, {"kv_shared_layers": 2, "scan_layers": False}, "kv_shared_layers=2 leaves no layer with keys and values"),
    (
        DENSE,
        {"kv_shared_layers": 1, "scan_layers": False, "remat": "full"},
        "kv_shared_layers is not supported with latent attention, and needs remat='none'",
    ),
    (DENSE, {"unscanned_first": 2, "unscanned_last": 1}, "unscanned_first=2 and unscanned_last=1 are more layers than"),
]


@pytest.mark.parametrize(("config", "change", "text"), WRONG, ids=[text[:30] for *_, text in WRONG])
def test_what_cannot_be_raises(config, change, text):
    with pytest.raises(ValueError, match=text):
        config.replace(**change)


def test_round_trip():
    assert Config.from_json(MOE.to_json()) == MOE
    assert eval(repr(MOE), {"ModelConfig": ModelConfig}) == MOE
