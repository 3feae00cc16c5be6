"""The training step of `step.py` in torch: the same transformer, in float32 or trained in low precision by torchao."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, width, hidden, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))

    def forward(self, x, batch):
        y = self.norm1(x)
        q, k, v = (dot(y).view(batch, -1, self.heads, self.width // self.heads) for dot in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(mixed.reshape(-1, self.width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    @property
    def width(self):
        return self.q.in_features


class Transformer(nn.Module):
    """Next-token cross-entropy of tokens."""

    def __init__(self, layers, width, hidden, heads, vocab):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.layers = nn.ModuleList(Block(width, hidden, heads) for _ in range(layers))

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1]).reshape(-1, self.embed.embedding_dim)
        for layer in self.layers:
            x = layer(x, tokens.shape[0])
        return functional.cross_entropy(self.head(x), tokens[:, 1:].reshape(-1))


def is_quantized(module, name):
    """The linear layers but for the last, as in `step.py`."""
    return isinstance(module, nn.Linear) and "head" not in name


def int8(model):
    """All three matmuls of each layer in int8, operands and gradient quantized in every step."""
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    # With its default, a subclass of tensors, torchao 0.18 on torch 2.13 multiplies in float32 and does not say so.
    quantize_(model, int8_mixed_precision_training(module_swap=True), filter_fn=is_quantized)


def float8(model):
    """All three matmuls of each layer in float8, one scale for each tensor, found in every step."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=is_quantized)


CONVERSIONS = {
    "float32": (lambda model: None, "aten::mm"),
    "int8": (int8, "aten::_int_mm"),
    "float8": (float8, "aten::_scaled_mm"),
}


def step(kind, sizes):
    """A call that takes a step of AdamW; RuntimeError where the matmuls are not in the precision asked for."""
    torch.manual_seed(0)
    batch, length = sizes.pop("batch"), sizes.pop("length")
    model = Transformer(**sizes)
    change, operator = CONVERSIONS[kind]
    change(model)
    tokens = torch.randint(0, sizes["vocab"], (batch, length + 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(tokens[:1, :33]).backward()
    found = sum(event.count for event in profile.key_averages() if event.key == operator)
    matmuls = 3 * sum(is_quantized(module, name) for name, module in model.named_modules())
    if found < matmuls:
        raise RuntimeError(f"only {found} of the {matmuls} matmuls are {operator}")
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    adam.zero_grad()
    loss = torch.compile(model)

    def call():
        loss(tokens).backward()
        adam.step()
        adam.zero_grad()

    return call
