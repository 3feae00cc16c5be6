"""A model of llama2.c, model.bin (version 0) and tokenizer.bin, as the files of a Hugging Face directory."""

import json
import math
import struct

_SPECIAL = ("<unk>", "<s>", "</s>")
_SPACE = "\u2581"


def to_huggingface(model: bytes, tokenizer: bytes) -> dict[str, bytes]:
    """The files of a directory that computes the same logits: float32 weights, tied embeddings."""
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack_from("<7i", model)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": length,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": [1, 2],  # in its training text bos separates the stories, and llama2.c itself stops there
    }
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return {
        "config.json": _json(config),
        "model.safetensors": _safetensors(model, dim, hidden, layers, heads, kv_heads, vocab),
        "tokenizer.json": _json(_tokenizer(_pieces(tokenizer))),
        "tokenizer_config.json": _json(settings),
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _safetensors(model: bytes, dim: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int) -> bytes:
    kv = dim // heads * kv_heads
    stacks = {  # one after the other in model.bin, each for all layers
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }
    shapes = {"model.embed_tokens": (vocab, dim)}
    shapes |= {f"model.layers.{i}.{name}": shape for name, shape in stacks.items() for i in range(layers)}
    shapes |= {"model.norm": (dim,)}
    header, tensors, at = {}, [], 28
    for name, shape in shapes.items():
        data = model[at : at + 4 * math.prod(shape)]
        if name.endswith(("q_proj", "k_proj")):
            data = _half_rotary(data, 4 * dim, heads if name.endswith("q_proj") else kv_heads)
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": (at - 28, at - 28 + len(data))}
        tensors.append(data)
        at += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors)


def _half_rotary(data: bytes, row: int, heads: int) -> bytes:
    """Rows in the order of Hugging Face's RoPE: llama2.c rotates neighbouring rows of a head, that one its halves."""
    size = len(data) // row // heads
    order = [head * size + i for head in range(heads) for i in (*range(0, size, 2), *range(1, size, 2))]
    return b"".join(data[i * row : (i + 1) * row] for i in order)


def _pieces(data: bytes) -> list[tuple[str, float]]:
    pieces, at = [], 4
    while at < len(data):
        score, size = struct.unpack_from("<fi", data, at)
        pieces.append((data[at + 8 : at + 8 + size].decode("utf-8", "replace").replace(" ", _SPACE), score))
        at += 8 + size
    return pieces


def _tokenizer(pieces: list[tuple[str, float]]) -> dict[str, object]:
    """SentencePiece's BPE: all pairs of pieces that make a piece are merges, ordered by its score.

    tokenizer.bin spells the bytes, ids 3 to 258, as text, so that ASCII pieces are in it twice: here those are <0x..>.
    """
    texts = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(text for text, _ in pieces[259:])]
    ids = {text: i for i, text in enumerate(texts)}
    merges = []
    for text, score in pieces[259:]:
        for left, right in ((text[:cut], text[cut:]) for cut in range(1, len(text))):
            if left in ids and right in ids:
                merges.append((-score, ids[left], ids[right]))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, **flags, "special": True} for i, text in enumerate(_SPECIAL)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, spaces]},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": [(texts[left], texts[right]) for _, left, right in sorted(merges)],
        },
    }
