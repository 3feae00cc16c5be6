"""LoRA on functions: in scan, on meshes, with quantized weights; merging; errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import octavo
from octavo.lora import LoraRule, adapted
from tests.arrays import normal

KEY = jax.random.key(0)
NORMAL = jax.nn.initializers.normal(0.1)
RULE = LoraRule(rank=2, alpha=4.0, lora_b_initializer=NORMAL)


def decoder(params, x):
    """Scanned layers of a dot and an einsum, and a tied, transposed output."""

    def layer(x, w):
        heads = jnp.einsum("bd,dnh->bnh", x, w["heads"])
        return jnp.tanh(x @ w["kernel"] + heads.reshape(x.shape)), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return x @ params["out"].T


@pytest.fixture(scope="module")
def made():
    normal = functools.partial(jax.random.normal, KEY)
    params = {"layers": {"kernel": normal((3, 8, 8)), "heads": normal((3, 8, 2, 4))}, "out": normal((5, 8))}
    x = normal((4, 8))
    return params, x, adapted(decoder, RULE).init(jax.random.key(1), params, x)


def test_stacked_adapters_differ_by_layer_and_merge_exactly(made):
    params, x, adapters = made
    assert jax.tree.map(jnp.shape, adapters["layers"]) == {
        "heads_lora_a": (3, 8, 2), "heads_lora_b": (3, 2, 2, 4), "kernel_lora_a": (3, 8, 2), "kernel_lora_b": (3, 2, 8)
    }  # fmt: skip
    assert len(np.unique(adapters["layers"]["kernel_lora_a"])) == 48
    tuned = adapted(decoder, RULE)
    out = jax.jit(tuned)(adapters, params, x)
    merged, errors = tuned.merge(adapters, params, x)
    np.testing.assert_allclose(decoder(merged, x), out, rtol=1e-4, atol=1e-4)
    assert np.abs(decoder(params, x) - out).max() > 0.1
    assert errors == {}


@pytest.mark.slow
def test_packed_weights_stay_packed_and_only_adapters_have_gradients(made):
    params, x, adapters = made
    rule = LoraRule(rank=2, alpha=4.0, weight_qtype="nf4", tile_size=4)
    low = octavo.convert(decoder, params, x, rules=rule)
    low = jax.tree.map(lambda q: q.pack(), low, is_leaf=lambda q: isinstance(q, octavo.QArray))
    assert low["layers"]["kernel"].qvalue.nbytes == 3 * 8 * 8 // 2
    tuned = adapted(decoder, rule)

    def loss(adapters, low):
        return (tuned(adapters, low, x) ** 2).sum()

    value, grads = jax.jit(jax.value_and_grad(loss))(adapters, low)
    floats = jax.tree.map(lambda q: q.dequantize(), low, is_leaf=lambda q: isinstance(q, octavo.QArray))
    reference = jax.value_and_grad(lambda a: (adapted(decoder, RULE)(a, floats, x) ** 2).sum())(adapters)
    np.testing.assert_allclose(value, reference[0], rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-3), grads, reference[1])
    merged, errors = tuned.merge(adapters, low, x, requantize=True)
    assert merged["out"].qtype.name == "nf4"
    assert set(errors) == {"layers/kernel", "layers/heads", "out"}
    assert all(0 < error < 0.2 for error in errors.values())
    assert tuned.merge(adapters, low, x).params["out"].dtype == jnp.float32


def test_adapters_of_sharded_weights(made):
    params, x, adapters = made
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = {"layers": {"kernel": (None, None, "model"), "heads": (None, None, "model")}, "out": (None, "model")}
    put = lambda value, axes: jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    sharded = jax.tree.map(put, params, spec, is_leaf=lambda s: isinstance(s, tuple))
    tuned = adapted(decoder, RULE)
    np.testing.assert_allclose(jax.jit(tuned)(adapters, sharded, x), tuned(adapters, params, x), rtol=1e-4, atol=1e-4)


def test_grouped_matmuls_have_an_adapter_per_group():
    def experts(params, x, sizes):
        return jax.lax.ragged_dot(x, params["w"], sizes)

    w, x, sizes = normal(10, 2, 4, 6), normal(11, 5, 4), jnp.asarray([2, 3])
    tuned = adapted(experts, RULE)
    adapters = tuned.init(KEY, {"w": w}, x, sizes)
    assert jax.tree.map(jnp.shape, adapters) == {"w_lora_a": (2, 4, 2), "w_lora_b": (2, 2, 6)}
    delta = 2.0 * adapters["w_lora_a"] @ adapters["w_lora_b"]
    expected = experts({"w": w + delta}, x, sizes)
    np.testing.assert_allclose(tuned(adapters, {"w": w}, x, sizes), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tuned.merge(adapters, {"w": w}, x, sizes).params["w"], w + delta, rtol=1e-5, atol=1e-6)


def test_dropout_needs_a_key_and_keeps_the_mean():
    tuned = adapted(lambda params, x: x @ params["w"], RULE.replace(dropout=0.5))
    params, x = {"w": jnp.zeros((4, 3))}, jnp.ones((1, 4))
    adapters = tuned.init(KEY, params, x)
    exact = tuned(adapters, params, x)  # without a key, as in evaluation
    np.testing.assert_allclose(exact, 2.0 * x @ adapters["w_lora_a"] @ adapters["w_lora_b"], rtol=1e-5)
    samples = jax.jit(jax.vmap(lambda key: tuned(adapters, params, x, key=key)))(jax.random.split(KEY, 4096))
    assert np.asarray(samples).std() > 0
    np.testing.assert_allclose(samples.mean(0), exact, atol=4 * float(samples.std(0).max()) / 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0, "alpha": 1.0}, r"rank=0: a whole number of at least 1"),
        ({"rank": 4, "alpha": 0.0}, r"alpha=0\.0: a positive number"),
        ({"rank": 4, "alpha": 1.0, "dropout": 1.0}, r"dropout=1\.0: a share"),
    ],
)
def test_fields_that_make_no_adapter(fields, message):
    with pytest.raises(ValueError, match=message):
        LoraRule(**fields)


def test_adapters_that_do_not_fit(made):
    params, x, adapters = made
    with pytest.raises(ValueError, match=r"rank=6 is more than the rank of its \(8, 5\) weight 'out', 5"):
        adapted(decoder, RULE.replace(rank=6, module_path="", op_names=())).init(KEY, params, x)
    with pytest.raises(ValueError, match=r"'heads_lora_a' has the shape \(8, 2\), but this matmul and rank need"):
        adapted(decoder, RULE.replace(rank=1))(adapters, params, x)
    with pytest.raises(ValueError, match=r"the state has no params/out_lora_a"):
        adapted(decoder, RULE)({"layers": adapters["layers"]}, params, x)


@pytest.mark.parametrize("steps", [1, 4])
def test_loftq_is_the_alternation_of_quantization_and_truncated_svd(made, steps):
    params, x, _ = made
    rule = LoraRule(rank=2, alpha=6.0, weight_qtype="int3", tile_size=4)
    tuned = adapted(decoder, rule)
    adapters, low = tuned.init_loftq(params, x, steps=steps)
    assert jax.tree.map(jnp.shape, adapters) == jax.tree.map(jnp.shape, tuned.init(KEY, params, x))
    merged, _ = tuned.merge(adapters, low, x)
    plain = octavo.convert(decoder, params, x, rules=rule)
    for path, matrix in (("kernel", (3, 8, 8)), ("heads", (3, 8, 8)), ("out", (1, 5, 8))):
        weight, own, q, p = (t["layers"][path] if path != "out" else t[path] for t in (params, merged, low, plain))
        weight, own, q, p = (np.asarray(t).reshape(matrix) for t in (weight, own, q.dequantize(), p.dequantize()))
        # What the last truncated decomposition leaves of W - Q is the sum of the other singular values.
        left = np.linalg.svd(weight - q, compute_uv=False)[:, 2:]
        np.testing.assert_allclose(np.sum((weight - own) ** 2), np.sum(left**2), rtol=1e-4)
        if steps == 1:
            np.testing.assert_array_equal(q, p)
        assert np.sum((weight - own) ** 2) < 0.6 * np.sum((weight - p) ** 2)
    np.testing.assert_allclose(tuned(adapters, low, x), decoder(merged, x), rtol=1e-4, atol=1e-4)


def test_with_statistics_adapters_make_up_for_the_error_of_outputs(made):
    params, _, _ = made
    spread = jnp.geomspace(0.05, 3, 8)
    x = jax.random.normal(KEY, (64, 8)) * spread[None]
    rule = LoraRule(rank=2, alpha=6.0, weight_qtype="int3", tile_size=4)
    tuned = adapted(decoder, rule)
    statistics, _ = octavo.ptq.collect_statistics(decoder, params, [x])
    plain, low = tuned.init_loftq(params, x, steps=1)
    own, same = tuned.init_loftq(params, x, steps=1, statistics=statistics)
    np.testing.assert_array_equal(same["layers"]["heads"].qvalue, low["layers"]["heads"].qvalue)
    for name in ("kernel", "heads"):
        errors = []
        for adapters in (plain, own):
            merged, _ = tuned.merge(adapters, low, x)
            error = (merged["layers"][name] - params["layers"][name]).reshape(3, 8, 8)
            errors.append(float(statistics[f"layers/{name}"].loss(error)))
        assert errors[1] < 0.8 * errors[0]
    with pytest.raises(ValueError, match=r"there is no Hessian of the inputs of 'layers/(heads|kernel)'"):
        tuned.init_loftq(params, x, statistics={})


def test_loftq_raises_for_what_it_cannot_quantize(made):
    params, x, _ = made
    with pytest.raises(ValueError, match="has no weight_qtype in its rule"):
        adapted(decoder, LoraRule(rank=2, alpha=6.0)).init_loftq(params, x)
    rule = LoraRule(rank=2, alpha=6.0, weight_qtype="int3", tile_size=4)
    low = octavo.convert(decoder, params, x, rules=rule)
    with pytest.raises(ValueError, match="is quantized already"):
        adapted(decoder, rule).init_loftq(low, x)
    with pytest.raises(ValueError, match="steps=0: LoftQ has at least one"):
        adapted(decoder, rule).init_loftq(params, x, steps=0)
