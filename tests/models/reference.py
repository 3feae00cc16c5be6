"""The decoder once more, without Flax and without haste: loops over heads and tokens, positions as complex numbers."""

import numpy as np

GATES = {"silu": lambda x: x / (1 + np.exp(-x)), "relu": lambda x: np.maximum(x, 0)}


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def norm(x, p, config):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * p["scale"]


def turn(x, position, config):
    """One head of one token: pairs of values as complex numbers, turned by the position."""
    half = config.head_dim // 2
    pairs = x[:half] + 1j * x[half:]
    angle = position * config.rope_theta ** (-2 * np.arange(half) / config.head_dim)
    turned = pairs * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag])


def attention(x, p, positions, segments, config):
    """Of one sequence."""
    length, dim = len(x), config.head_dim
    out = np.zeros((length, config.num_query_heads * dim))
    for head in range(config.num_query_heads):
        shared = head * config.num_kv_heads // config.num_query_heads
        columns, kv = slice(head * dim, head * dim + dim), slice(shared * dim, shared * dim + dim)
        q = [turn(x[t] @ p["query"]["kernel"][:, columns], positions[t], config) for t in range(length)]
        k = [turn(x[t] @ p["key"]["kernel"][:, kv], positions[t], config) for t in range(length)]
        v = x @ p["value"]["kernel"][:, kv]
        for t in range(length):
            seen = [s for s in range(t + 1) if segments[s] == segments[t]]
            weights = softmax(np.array([q[t] @ k[s] / np.sqrt(dim) for s in seen]))
            out[t, columns] = sum(w * v[s] for w, s in zip(weights, seen, strict=True))
    return out @ p["out"]["kernel"]


def mlp(x, p, config, expert=()):
    gate, up, down = (p[name]["kernel"][expert] for name in ("wi_0", "wi_1", "wo"))
    return (GATES[config.activation](x @ gate) * (x @ up)) @ down


def moe(tokens, p, config):
    """Token by token; and how unevenly they are spread."""
    out, k = np.zeros_like(tokens), config.experts_per_token
    share, mean = np.zeros(config.num_experts), np.zeros(config.num_experts)
    for t, x in enumerate(tokens):
        probabilities = softmax(x @ p["router"]["kernel"])
        chosen = np.argsort(-probabilities, kind="stable")[:k]
        total = probabilities[chosen].sum() if k > 1 else 1
        out[t] = sum(probabilities[e] / total * mlp(x, p, config, e) for e in chosen)
        share[chosen] += 1 / (k * len(tokens))
        mean += probabilities / len(tokens)
    if config.shared_experts:
        out += mlp(tokens, p["shared_experts"], config)
    return out, config.num_experts * (share * mean).sum()


def layers_of(decoder, config):
    """The parameters of each layer, from the unscanned form."""
    names = [f"first_layers_{i}" for i in range(config.unscanned_first)]
    names += sorted((n for n in decoder if n.startswith("dense_layers_")), key=lambda n: int(n.split("_")[-1]))
    names += sorted((n for n in decoder if n.startswith("layers_")), key=lambda n: int(n.split("_")[-1]))
    return [decoder[n] for n in names + [f"last_layers_{i}" for i in range(config.unscanned_last)]]


def forward(params, tokens, positions, segments, config):
    """Logits and load balance, from unscanned parameters as float64."""
    table, decoder = params["token_embedder"]["embedding"], params["decoder"]
    x, loads = table[tokens], []
    for p in layers_of(decoder, config):
        y = norm(x, p["pre_self_attention_layer_norm"], config)
        rows = zip(y, positions, segments, strict=True)
        x = x + np.stack([attention(row, p["self_attention"], *where, config) for row, *where in rows])
        y = norm(x, p["post_self_attention_layer_norm"], config)
        if "mlp" in p:
            x = x + mlp(y, p["mlp"], config)
        else:
            out, load = moe(y.reshape(-1, y.shape[-1]), p["moe_block"], config)
            x, loads = x + out.reshape(x.shape), [*loads, load]
    x = norm(x, decoder["decoder_norm"], config)
    logits = x @ (table.T if config.tied_logits else decoder["logits_dense"]["kernel"])
    return logits, np.mean(loads) if loads else 0.0
