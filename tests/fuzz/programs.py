"""Random JAX programs under random rules: what a rule matches is quantized, the rest is not, and nothing is silent.

A program is a tree of layers: matmuls, nested jits, loops, branches, rematerialization, vmaps, shard_map over all
devices (eight, unless XLA_FLAGS says otherwise) and functions with derivatives of their own. The number of integer dots
in the quantized program, counted by a walk of its jaxpr, must be that of the matched weights; a rule that matches no
matmul must raise; values and gradients stay near those in float.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import octavo
from tests.fuzz.runner import Case, DefectError, Fuzzer

WIDTH = 8
ROWS = 8
CONTAINERS = ("jit", "remat", "fori", "vmap", "custom_vjp", "custom_jvp", "scan_body", "shard_map")
OPAQUE = ("custom_vjp", "custom_jvp")


def draw(rng: np.random.Generator) -> Case:
    layers = draw_layers(rng, depth=0)
    names = sorted(set(weights(layers)))
    chosen = str(rng.choice(["all", "some", "some", "none"]))
    match = {"all": names, "none": [], "some": [n for n in names if rng.random() < 0.5]}[chosen]
    gradient, exported = bool(rng.random() < 0.4), bool(rng.random() < 0.1)
    seed = int(rng.integers(2**31))
    return {"layers": layers, "match": match, "gradient": gradient, "export": exported, "seed": seed}


def draw_layers(rng: np.random.Generator, depth: int) -> list[Any]:
    return [draw_layer(rng, depth) for _ in range(rng.integers(1, 4 - depth))]


def draw_layer(rng: np.random.Generator, depth: int) -> list[Any]:
    kinds = ["dense", "dense", "einsum", "tanh", "scan"]
    if depth < 2:
        kinds += ["cond", "jit", *CONTAINERS]
    kind = str(rng.choice(kinds))
    if kind == "shard_map":
        depth = 1  # it holds no other container: meshes do not nest, and rows cannot be sharded twice
    if kind in ("dense", "einsum", "scan"):
        return [kind, int(rng.integers(3))]
    if kind == "tanh":
        return [kind]
    if kind == "cond":
        return [kind, draw_layers(rng, depth + 1), draw_layers(rng, depth + 1)]
    return [kind, draw_layers(rng, depth + 1)]


def weights(layers: list[Any], opaque: bool = False) -> Iterator[str]:
    """The weight of each matmul in a program; with `opaque`, only those that a rule can reach."""
    for kind, *args in layers:
        if kind in ("dense", "einsum"):
            yield f"w{args[0]}"
        elif kind == "scan":
            yield f"s{args[0]}"
        elif kind != "tanh" and not (opaque and kind in OPAQUE):
            for inner in args:
                yield from weights(inner, opaque)


def run(layers: list[Any], params: dict[str, Any], x: Any) -> Any:
    for kind, *args in layers:
        x = _LAYERS[kind](params, x, *args)
    return x


def dense(params, x, i):
    return jnp.tanh(x @ params[f"w{i}"])


def einsum(params, x, i):
    return jnp.tanh(jnp.einsum("...i,io->...o", x, params[f"w{i}"]))


def scan(params, x, i):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params[f"s{i}"])[0]


def custom_vjp(params, x, layers):
    @jax.custom_vjp
    def opaque(params, x):
        return run(layers, params, x)

    opaque.defvjp(lambda p, x: jax.vjp(lambda p, x: run(layers, p, x), p, x), lambda vjp, g: vjp(g))
    return opaque(params, x)


def custom_jvp(params, x, layers):
    @jax.custom_jvp
    def opaque(params, x):
        return run(layers, params, x)

    opaque.defjvp(lambda primals, tangents: jax.jvp(lambda p, x: run(layers, p, x), primals, tangents))
    return opaque(params, x)


def shard_map(params, x, layers):
    if x.ndim != 2 or x.shape[0] % jax.device_count():
        return run(layers, params, x)
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    shards = jax.shard_map(lambda p, x: run(layers, p, x), mesh=mesh, in_specs=(everywhere, rows), out_specs=rows)
    return shards(params, x)


def cond(params, x, yes, no):
    # The predicate has no rounding error, which might choose another branch than in float.
    positive = params["w0"][0, 0] > 0
    return jax.lax.cond(positive, lambda p, x: run(yes, p, x), lambda p, x: run(no, p, x), params, x)


_LAYERS = {
    "dense": dense,
    "einsum": einsum,
    "scan": scan,
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
    "shard_map": shard_map,
    "cond": cond,
    "tanh": lambda params, x: jnp.tanh(x),
    "jit": lambda params, x, layers: jax.jit(lambda p, x: run(layers, p, x))(params, x),
    "remat": lambda params, x, layers: jax.checkpoint(lambda p, x: run(layers, p, x))(params, x),
    "fori": lambda params, x, layers: jax.lax.fori_loop(0, 2, lambda i, x: run(layers, params, x), x),
    "vmap": lambda params, x, layers: jax.vmap(lambda x: run(layers, params, x))(jnp.stack([x, -x]))[0],
    "scan_body": lambda params, x, layers: jax.lax.scan(lambda x, _: (run(layers, params, x), None), x, None, length=2)[
        0
    ],
}


def integer_dots(jaxpr: Any) -> int:
    """The dots of integers in a jaxpr, with those of all inner jaxprs."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            count += all(jnp.issubdtype(v.aval.dtype, jnp.integer) for v in eqn.invars)
        values = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)
        inner = [integer_dots(getattr(value, "jaxpr", value)) for value in values if is_jaxpr(value)]
        # Only one branch of those for different platforms is compiled.
        count += max(inner) if eqn.params.get("branches_platforms") else sum(inner)
    return count


def is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def check(case: Case) -> str:
    layers, rng = case["layers"], np.random.default_rng(case["seed"])
    params = {f"w{i}": rng.standard_normal((WIDTH, WIDTH)) / 2 for i in range(3)}
    params |= {f"s{i}": rng.standard_normal((2, WIDTH, WIDTH)) / 2 for i in range(3)}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    x = jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32)

    def program(params, x):
        return run(layers, params, x)

    rule = octavo.QtRule(
        module_path="|".join(case["match"]) or "absent", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"
    )
    low = octavo.quantized(program, rule)
    reachable = [name for name in weights(layers, opaque=True) if name in case["match"]]
    try:
        made = jax.make_jaxpr(low)(params, x)
    except ValueError as error:
        if reachable or ("would change nothing" not in str(error) and "has a weight" not in str(error)):
            raise
        return "nothing matches"
    if not reachable:
        raise DefectError("no rule matches a matmul, and nothing was said")
    found = integer_dots(made.jaxpr)
    if found != len(reachable):
        raise DefectError(f"{found} integer dots for {len(reachable)} matched matmuls")
    want, got = program(params, x), low(params, x)
    error = float(jnp.linalg.norm(got - want) / (jnp.linalg.norm(want) + 1e-6))
    if not error < 0.2:
        raise DefectError(f"the relative error is {error:.3g}")
    if case.get("export") and "shard_map" not in str(layers):  # exported for 8 devices, it is called on as many only
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, x))
        out = export.export(jax.jit(low))(*shapes).call(params, x)
        if not jnp.linalg.norm(out - want) <= 0.2 * jnp.linalg.norm(want) + 1e-6:
            raise DefectError("the exported program computes something else")
    has_loop = "fori" in str(layers)  # reverse mode needs a static trip count, which it has, but costs a compilation
    if case["gradient"] and not has_loop:
        loss = lambda f: jax.grad(lambda p: (f(p, x) ** 2).sum())(params)  # noqa: E731
        for name, (a, b) in jax.tree.map(lambda a, b: (a, b), loss(low), loss(program)).items():
            if not bool(jnp.isfinite(a).all()) or not jnp.linalg.norm(a - b) <= 0.5 * jnp.linalg.norm(b) + 0.05:
                raise DefectError(f"the gradient of {name} is off by {jnp.linalg.norm(a - b):.3g}")
        return "gradient"
    return "forward"


def shrink(case: Case) -> Iterator[Case]:
    if case["gradient"]:
        yield case | {"gradient": False}
    for layers in smaller(case["layers"]):
        yield case | {"layers": layers}
    for name in case["match"]:
        yield case | {"match": [n for n in case["match"] if n != name]}


def smaller(layers: list[Any]) -> Iterator[list[Any]]:
    """Programs with one layer fewer, or with one container replaced by what it holds."""
    for i, (kind, *args) in enumerate(layers):
        if len(layers) > 1:
            yield layers[:i] + layers[i + 1 :]
        if kind in CONTAINERS or kind == "cond":
            for j, inner in enumerate(args):
                yield layers[:i] + inner + layers[i + 1 :]
                for each in smaller(inner):
                    yield [*layers[:i], [kind, *args[:j], each, *args[j + 1 :]], *layers[i + 1 :]]


PROGRAMS = Fuzzer("programs", draw, check, shrink)
