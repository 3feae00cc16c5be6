"""Rotations that are part of the weights: the model computes the same, without outliers in its hidden states.

Ashkboos et al., QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs (arXiv 2404.00456). With orthogonal Q, hidden
states x become x Q, since RMS norms commute with it: embeddings E Q, matmuls that read hidden states Q^T diag(g) W with
the scale g of the norm before them, and matmuls that write them W Q (R1). The values of each head become v H, and the
output matmul of attention H^T W (R2).

`hadamard` adds rotations that are computed while the model runs, by blocks: of queries and keys (R3), of the inputs of
the second matmul of MLPs (R4), or of the inputs of all matmuls of layers, as Egiazarian et al., Bridging the Gap
Between Promise and Performance for Microscaling FP4 Quantization (arXiv 2509.23202), have them for mxfp4.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from octavo.models import ModelConfig
from octavo.models.config import HADAMARD
from octavo.ops.hadamard import hadamard_matrix
from octavo.pretrained.model import Leaf, PretrainedModel, to_float
from octavo.pretrained.names import EMBEDDING, LOGITS

_NORM = "decoder/decoder_norm/scale"
_WRITERS = ("out", "wo")


def rotated(source: PretrainedModel, *, seed: int = 0) -> PretrainedModel:
    """The same model with randomly rotated hidden states and values; its logits are equal up to float rounding.

    Logits that are tied to the embedding table get a matrix of their own, because the scale of the last norm is part of
    them.

    Args:
      source: A decoder with RMS norms before attention and MLP, in float or quantized; the result is in float32.
      seed: Of the random rotation.
    """
    variants = source.config.variants()
    unsupported = [name for name in ("norm", "norm_place", "learned_positions", "kv_lora_rank") if name in variants]
    if unsupported:
        name = unsupported[0]
        raise ValueError(
            f"{source.name} has {name}={getattr(source.config, name)!r}: only models with RMS norms before attention "
            "and MLP, without learned positions and latent attention, can be rotated"
        )
    if any(getattr(source.config, name) for name in HADAMARD):
        raise ValueError(f"{source.name} has Hadamard rotations already: rotate it first, and add them then")
    if source.rules:
        raise ValueError(f"{source.name} has rules for its activations, which are for the model as it was trained")
    leaves = dict(source.leaves)
    if source.config.tied_logits:
        leaves[LOGITS] = leaves[EMBEDDING].T
    rotation = functools.cache(functools.partial(random_rotation, seed=seed))
    found = {
        path: Leaf(leaf.shape, "float32", functools.partial(_load, source.config, leaves, path, rotation), "float32")
        for path, leaf in leaves.items()
    }
    return dataclasses.replace(source, config=source.config.replace(tied_logits=False), leaves=found)


def hadamard(source: PretrainedModel, *, inputs: int = 0, mlp: int = 0, keys: int = 0) -> PretrainedModel:
    """The same model with Hadamard rotations while it runs; its logits are equal up to float rounding.

    Args:
      source: A decoder, in float or quantized; the result is in float32.
      inputs: The block size of rotations of the inputs of all matmuls of layers; 0 for none.
      mlp: That of the inputs of the second matmul of MLPs: R4.
      keys: That of queries and keys after their rotary embedding, for low-bit KV caches: R3.
    """
    if source.rules:
        raise ValueError(f"{source.name} has rules for its activations, which are for the model as it was trained")
    if source.config.fused or any(getattr(source.config, name) for name in HADAMARD):
        raise ValueError(f"{source.name} is rotated or fused already: start from the model as it was published")
    config = source.config.replace(hadamard_inputs=inputs, hadamard_mlp=mlp, hadamard_keys=keys)
    found = {}
    for path, leaf in source.leaves.items():
        *parents, module, kind = path.split("/")
        block = (mlp if module == "wo" else 0) or inputs
        if not block or kind != "kernel" or not {"self_attention", "mlp"} & {*parents}:
            found[path] = leaf
        else:
            load = functools.partial(_rotated_inputs, leaf, block)
            found[path] = Leaf(leaf.shape, "float32", load, "float32")
    return dataclasses.replace(source, config=config, leaves=found)


def _rotated_inputs(leaf: Leaf, block: int) -> np.ndarray:
    value = to_float(leaf.load(), "float32")
    *stack, inputs, outputs = value.shape
    blocks = value.reshape(*stack, inputs // block, block, outputs)
    return np.einsum("ij,...bjn->...bin", hadamard_matrix(block), blocks).reshape(value.shape)


def random_rotation(size: int, *, seed: int = 0) -> np.ndarray:
    """A random orthogonal matrix: random signs, and a Hadamard matrix times a random rotation of the odd factor.

    >>> q = random_rotation(12)
    >>> bool(np.allclose(q.T @ q, np.eye(12)))
    True
    """
    rng = np.random.default_rng(seed)
    power = size & -size
    odd, _ = np.linalg.qr(rng.standard_normal((size // power, size // power)))
    # Of the exact matrix of signs: hadamard_matrix is in float32.
    signs = np.sign(hadamard_matrix(power)).astype(np.float64) / math.sqrt(power)
    return rng.choice([-1.0, 1.0], size=(size, 1)) * np.kron(signs, odd)


def _load(
    config: ModelConfig, leaves: Mapping[str, Leaf], path: str, rotation: Callable[[int], np.ndarray]
) -> np.ndarray:
    """A parameter of the rotated model."""
    *parents, module, kind = path.split("/")
    value = to_float(leaves[path].load(), "float32").astype(np.float64)
    if path == _NORM or module.endswith("_self_attention_layer_norm"):
        return np.ones(value.shape, np.float32)
    hidden, heads = rotation(config.emb_dim), rotation(config.head_dim)
    if path == EMBEDDING:
        value = value @ hidden
    elif module == "value":
        value = _by_head(value, heads)
    elif module == "out" and kind == "kernel":
        value = _by_head(value.T, heads).T
    if module in _WRITERS:
        value = value @ hidden
    elif kind == "kernel" and (norm := _norm(path, parents)) is not None:
        scale = to_float(leaves[norm].load(), "float32").astype(np.float64)
        value = hidden.T @ (scale[:, None] * value)
    return value.astype(np.float32)


def _by_head(value: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    return (value.reshape(*value.shape[:-1], -1, len(rotation)) @ rotation).reshape(value.shape)


def _norm(path: str, parents: list[str]) -> str | None:
    """The norm before a matmul of hidden states; None of other parameters."""
    if path == LOGITS:
        return _NORM
    place = {"self_attention": "pre", "mlp": "post", "moe_block": "post"}
    for i, name in enumerate(parents):
        if name in place:
            return "/".join((*parents[:i], f"{place[name]}_self_attention_layer_norm", "scale"))
    return None
