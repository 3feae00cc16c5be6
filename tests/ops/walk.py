"""Reading a jaxpr: which matmuls and convolutions it holds, at any depth."""

import jax


def equations(jaxpr, names=("dot_general", "conv_general_dilated", "ragged_dot_general")):
    """Every equation of these primitives, in nested jaxprs too."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            yield eqn
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                if hasattr(sub, "eqns") or hasattr(getattr(sub, "jaxpr", None), "eqns"):
                    yield from equations(sub, names)


def dot_types(fn, *args, **kwargs):
    """The operand dtypes of every matmul in a function's jaxpr, without repetition, in order."""
    found = [
        tuple(str(v.aval.dtype) for v in (*eqn.invars[:2], eqn.outvars[0]))
        for eqn in equations(jax.make_jaxpr(fn)(*args, **kwargs))
    ]
    return found
