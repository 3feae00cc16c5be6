"""Delayed scaling in stacked layers and pipeline-like stages: every stage has histories of its own."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo.frameworks.linen_ops import DotGeneral, Einsum
from octavo.rules import dot_config, recipe
from octavo.transform.state import GRADIENT_STATE
from tests.arrays import normal

KEY = jax.random.key(0)
FP8 = dot_config(recipe("te_fp8_delayedscaling", exclude=None)[0], lhs_weight=False, rhs_weight=True)
STAGES, STEPS = 2, 2
AXES = {"params": 0, GRADIENT_STATE: 0}
X = normal(1, 8, 16)


class Layer(nn.Module):
    """A dense layer and an einsum, each with a history for its input, weight and gradient."""

    @nn.compact
    def __call__(self, x, _=None):
        dot = functools.partial(DotGeneral, FP8)
        y = nn.Dense(16, use_bias=False, dot_general_cls=dot)(x)
        w = self.param("w", nn.initializers.lecun_normal(), (16, 16))
        return x + Einsum(FP8)("bi,io->bo", jnp.tanh(y), w), None


def slice_of(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def stack(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def saved_and_restored(tree):
    """Through a flat list of NumPy arrays, as any checkpoint would."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.map(jnp.asarray, jax.tree.unflatten(structure, [np.array(x) for x in leaves]))


def train(grad, variables, batches):
    """Steps of two microbatches each: gradients summed and clipped, histories kept; saved and restored in between."""
    for a, b in batches:
        grads = octavo.accumulate_gradients(grad(variables, a), grad(variables, b))
        own, _ = octavo.split_gradients(grads)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(own)))
        clip = jnp.minimum(1, 1 / norm)
        variables = octavo.overwrite_with_gradients(variables, grads)
        params = jax.tree.map(lambda w, g, clip=clip: w - 0.1 * clip * g, variables["params"], own["params"])
        variables = saved_and_restored({**variables, "params": params})
    return variables


def batches(shape):
    keys = jax.random.split(jax.random.key(2), (STEPS, 2))
    return [[(1 + step) * jax.random.normal(k, shape) for k in pair] for step, pair in enumerate(keys)]


def assert_same_and_of_their_own(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours[GRADIENT_STATE], theirs[GRADIENT_STATE])
    for history in jax.tree.leaves(ours[GRADIENT_STATE]):
        newest = np.asarray(history)[..., :STEPS, :, :].reshape(STAGES, -1)
        assert len(np.unique(newest, axis=0)) == STAGES  # no stage has another's
        assert np.all(newest > 0)


def unrolled(variables, x):
    for i in range(STAGES):
        x, _ = Layer().apply(slice_of(variables, i), x)
    return x


def both(run, reference, variables, shape):
    """The variables that training leaves, of a model and of what it is to equal."""
    grads = [jax.jit(jax.grad(lambda v, x, fn=fn: jnp.mean(fn(v, x) ** 2))) for fn in (run, reference)]
    return [train(grad, variables, batches(shape)) for grad in grads]


@pytest.mark.standard_promotion
class TestInjected:
    @pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_layers_of_a_scan_have_the_histories_of_an_unrolled_loop(self, remat):
        layer = nn.remat(Layer, prevent_cse=False) if remat else Layer
        model = nn.scan(layer, variable_axes=AXES, split_rngs={"params": True}, length=STAGES)()
        variables = jax.jit(model.init)(KEY, X)
        run = lambda v, x: model.apply(v, x)[0]  # noqa: E731
        assert_same_and_of_their_own(*both(run, unrolled, variables, X.shape))

    def test_stages_of_a_vmap_have_the_histories_of_a_loop(self):
        """All stages at once, each on rows of its own, as between two steps of a pipeline."""
        model = nn.vmap(Layer, variable_axes=AXES, split_rngs={"params": True})()
        x = jnp.stack([X] * STAGES)
        variables = jax.jit(model.init)(KEY, x)
        run = lambda v, x: model.apply(v, x)[0]  # noqa: E731
        loop = lambda v, x: stack([Layer().apply(slice_of(v, i), x[i])[0] for i in range(STAGES)])  # noqa: E731
        assert_same_and_of_their_own(*both(run, loop, variables, x.shape))

    @pytest.mark.slow
    def test_a_pipeline_has_a_history_for_each_stage_and_turn(self):
        """Turns over vmapped stages, whose rows move on by a stage with every turn; all turns share the parameters."""
        turns = 2
        stages = nn.vmap(Layer, variable_axes=AXES, split_rngs={"params": True})

        class Turn(nn.Module):
            @nn.compact
            def __call__(self, x, new):
                x = jnp.concatenate([new[None], x[:-1]])
                x, _ = stages(name="stages")(x)
                return x, x

        model = nn.scan(
            Turn,
            variable_axes={GRADIENT_STATE: 0},
            variable_broadcast="params",
            split_rngs={"params": False},
            length=turns,
        )()
        start = jnp.ones((STAGES, *X.shape))
        rows = jnp.stack([X] * turns)
        variables = jax.jit(model.init)(KEY, start, rows)
        assert jax.tree.leaves(variables[GRADIENT_STATE])[0].shape[:2] == (turns, STAGES)

        def loop(v, rows):
            x, seen = list(start), []
            for t in range(turns):
                x = [rows[t], *x[:-1]]
                own = lambda i, t=t: {  # noqa: E731
                    "params": slice_of(v["params"]["stages"], i),
                    GRADIENT_STATE: slice_of(slice_of(v[GRADIENT_STATE]["stages"], t), i),
                }
                x = [Layer().apply(own(i), x[i])[0] for i in range(STAGES)]
                seen.append(jnp.stack(x))
            return jnp.stack(seen)

        run = lambda v, x: model.apply(v, start, x)[1]  # noqa: E731
        ours, theirs = both(run, loop, variables, rows.shape)
        jax.tree.map(np.testing.assert_array_equal, ours[GRADIENT_STATE], theirs[GRADIENT_STATE])

    @pytest.mark.parametrize("kind", ["dot", "layer", "broadcast"])
    def test_state_that_two_products_would_share_raises(self, kind):
        """The gradients of both would be added up, and the history be neither's."""

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                if kind == "dot":
                    dot = DotGeneral(FP8)
                    return nn.Dense(16, dot_general=dot)(nn.Dense(16, dot_general=dot)(x))
                if kind == "layer":
                    dense = nn.Dense(16, dot_general_cls=functools.partial(DotGeneral, FP8))
                    return dense(dense(x))
                shared = {"variable_axes": {"params": 0}, "variable_broadcast": GRADIENT_STATE}
                return nn.scan(Layer, **shared, split_rngs={"params": True}, length=2)()(x)[0]

        with pytest.raises(ValueError, match=r"is used by two matmuls, but delayed scaling keeps.*dot_general_cls="):
            Model().init(KEY, X)


def layer(params, x):
    with jax.named_scope("layer"):
        return x + jnp.tanh(x @ params["a"]) @ params["b"]


def parameters():
    shape = (STAGES, 16, 16)
    return {n: normal(i, *shape) / 4 for i, n in enumerate(("a", "b"))}


class TestFunctions:
    rules = recipe("te_fp8_delayedscaling", exclude=None)

    def variables(self, low, *args):
        params = parameters()
        return {"params": params, **low.init(params, *args)}

    @staticmethod
    def applied(low):
        def run(variables, x):
            state = {name: tree for name, tree in variables.items() if name != "params"}
            return low.stateful(state)(variables["params"], x)[0]

        return run

    @pytest.mark.slow
    def test_layers_of_a_scan_have_the_histories_of_an_unrolled_loop(self):
        def model(params, x):
            return jax.lax.scan(lambda x, params: (layer(params, x), None), x, params)[0]

        low, one = octavo.quantized(model, self.rules), octavo.quantized(layer, self.rules)
        variables = self.variables(low, X)

        def loop(variables, x):
            for i in range(STAGES):
                x = self.applied(one)(slice_of(variables, i), x)
            return x

        assert_same_and_of_their_own(*both(self.applied(low), loop, variables, X.shape))

    def test_stages_of_a_vmap_have_the_histories_of_a_loop(self):
        one = octavo.quantized(layer, self.rules)
        x = jnp.stack([X] * STAGES)
        params = parameters()
        variables = {"params": params, **jax.vmap(one.init)(params, x)}
        loop = lambda v, x: stack([self.applied(one)(slice_of(v, i), x[i]) for i in range(STAGES)])  # noqa: E731
        assert_same_and_of_their_own(*both(jax.vmap(self.applied(one)), loop, variables, x.shape))

    @pytest.mark.slow
    def test_stages_mapped_within_the_function_are_one_product(self):
        """A program has no stages, only a product with a batch axis: what is to have a range of its own is mapped."""
        low = octavo.quantized(jax.vmap(layer), self.rules, weights=0)
        x = jnp.stack([X, 3 * X])
        variables = self.variables(low, x)
        grads = jax.grad(lambda v: jnp.sum(self.applied(low)(v, x)))(variables)
        history = grads[GRADIENT_STATE]["dot_general0"]["lhs"]["amax_history"]
        assert history.shape == (1024, 1, 1, 1)
        assert history.ravel()[0] == 3 * jnp.max(jnp.abs(X))
