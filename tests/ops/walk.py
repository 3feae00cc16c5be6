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


def dot_types(fn, *args, static_argnums=()):
    """The dtypes of both operands and the result, of every matmul in a function's jaxpr."""
    jaxpr = jax.make_jaxpr(fn, static_argnums=static_argnums)(*args)
    return [tuple(str(v.aval.dtype) for v in (*e.invars[:2], e.outvars[0])) for e in equations(jaxpr)]
