"""The names of the axes: of the mesh, and the logical ones of parameters and activations."""

AXES = ("data", "stage", "fsdp", "context", "tensor", "expert")
"""The axes in their default order, from the slowest links to the fastest."""

DEFAULT_RULES: dict[str, tuple[str, ...]] = {
    "activation_batch": ("data", "fsdp", "expert"),
    "activation_length": ("context",),
    "activation_kv_length": (),
    "activation_embed": (),
    "activation_heads": ("tensor",),
    "activation_kv_heads": ("tensor",),
    "activation_mlp": ("tensor",),
    "activation_vocab": ("tensor",),
    "layers": ("stage",),
    "vocab": ("tensor",),
    "embed": ("fsdp", "context", "expert"),
    "embed_moe": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "kv": (),
    "mlp": ("tensor",),
    "mlp_moe": ("tensor",),
    "exp": ("expert",),
    "norm": ("fsdp", "context", "expert"),
}
"""Names as in MaxText. Where an axis of the mesh is one long, a rule has no effect."""


def split_axes(text: str) -> tuple[str, ...]:
    """Axes with + between them.

    >>> split_axes("fsdp+expert"), split_axes("")
    (('fsdp', 'expert'), ())
    """
    return tuple(axis.strip() for axis in text.split("+") if axis.strip())
