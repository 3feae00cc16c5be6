"""Calibration and quantization of functions and models: loops, einsums, frameworks, bad input."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import octavo
from octavo.ptq import collect_statistics, load_statistics, quantize, quantize_weights, save_statistics
from tests.arrays import normal

RULE = octavo.QuantizationRule(weight_qtype="int4", tile_size=16)


def predict(params, x):
    """Stacked layers in a scan, split heads, a table that is used transposed, and a weight on the left."""

    def layer(h, w):
        heads = jnp.tanh(jnp.einsum("bk,khd->bhd", h, w["up"]))
        return h + jnp.einsum("bhd,hdk->bk", heads, w["down"]), None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    return params["left"] @ (h @ params["table"].T).T


@pytest.fixture(scope="module")
def params():
    layers = {"up": normal(0, 3, 32, 2, 16) / 6, "down": normal(1, 3, 2, 16, 32) / 6}
    return {"layers": layers, "table": normal(2, 20, 32), "left": normal(3, 5, 20)}


@pytest.fixture(scope="module")
def batches():
    scale = jnp.geomspace(0.05, 2, 32)[None]
    return [normal(4, 100, 16) @ normal(5, 16, 32) * scale, normal(6, 60, 16) @ normal(5, 16, 32) * scale]


def inputs_of(params, x):
    """The inputs of each matmul, in NumPy."""
    found, h = {"up": [], "down": []}, np.asarray(x)
    for i in range(3):
        heads = np.tanh(np.einsum("bk,khd->bhd", h, params["layers"]["up"][i])).reshape(len(h), 32)
        found["up"].append(h)
        found["down"].append(heads)
        h = h + heads @ np.asarray(params["layers"]["down"][i]).reshape(32, 32)
    return found | {"table": [h], "left": [(h @ np.asarray(params["table"]).T)]}


def test_the_statistics_of_every_weight(params, batches):
    found, missing = collect_statistics(predict, params, batches)
    assert not missing
    wanted = {}
    for x in batches:
        for name, parts in inputs_of(params, x).items():
            wanted.setdefault(name, []).append(parts)
    for name, parts in wanted.items():
        stats = found[name if name in params else f"layers/{name}"]
        leaf = params[name] if name in params else params["layers"][name]
        stack = leaf.reshape(3, 32, 32) if leaf.ndim == 4 else leaf.T[None]
        loss = 0.0
        for i, layer in enumerate(zip(*parts, strict=True)):
            x = np.concatenate(layer)
            loss += np.mean(np.sum((x @ np.asarray(stack[i])) ** 2, axis=1))
            np.testing.assert_allclose(np.sort(stats.mean_abs[i]), np.sort(np.abs(x).mean(axis=0)), rtol=1e-3)
            np.testing.assert_allclose(np.sort(stats.max_abs[i]), np.sort(np.abs(x).max(axis=0)), rtol=1e-4)
            np.testing.assert_allclose(np.trace(stats.hessian[i]), np.mean(np.sum(x**2, axis=1)), rtol=1e-4)
            assert stats.tokens[i] == len(x)
        # The order of inputs is that of the matmul; with the weight in the same order, the outputs have their power.
        np.testing.assert_allclose(stats.loss(stats.view.matrices(leaf)), loss, rtol=1e-4)


@pytest.mark.slow
def test_a_function_with_a_scan(params, batches):
    lines, counts = [], []
    low = quantize(predict, params, RULE, batches, log=lines.append, progress=counts.append)
    assert counts == [1, 2]
    assert len(lines) == 4
    assert "error of the outputs" in lines[0]
    plain = octavo.convert(predict, params, batches[0], rules=RULE)
    assert jax.tree.structure(low) == jax.tree.structure(plain)
    run = jax.jit(octavo.served(predict, RULE))
    x = batches[1]
    wanted = predict(params, x)
    error = {name: float(jnp.mean((run(p, x) - wanted) ** 2)) for name, p in {"gptq": low, "round": plain}.items()}
    assert error["gptq"] < 0.6 * error["round"]


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(32, name="up")(x))
        return nn.Dense(8, name="down", kernel_init=nn.with_partitioning(nn.initializers.normal(), (None, "out")))(x)


def test_a_linen_model(batches):
    model = Model()
    variables = model.init(jax.random.key(0), batches[0])
    low = quantize(model, variables, RULE, batches)
    plain = octavo.convert(model, variables, batches[0], rules=RULE)
    assert jax.tree.structure(low) == jax.tree.structure(plain)
    served = octavo.served(model, RULE)
    wanted, x = model.apply(variables, batches[1]), batches[1]
    error = [float(jnp.mean((served.apply(p, x) - wanted) ** 2)) for p in (low, plain)]
    assert error[0] < 0.7 * error[1]


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def test_an_nnx_model(batches):
    model = NnxModel(nnx.Rngs(0))
    low = quantize(model, None, RULE, batches)
    plain = octavo.quantize_model(model, octavo.PtqProvider(RULE), batches[0])
    wanted = model(batches[1])
    error = [float(jnp.mean((m(batches[1]) - wanted) ** 2)) for m in (low, plain)]
    assert error[0] < 0.7 * error[1]
    assert isinstance(model.layers[0].kernel.get_value(), jax.Array)  # the given model is unchanged


def test_an_equinox_model_as_a_function(batches):
    import equinox as eqx

    model = eqx.nn.MLP(32, 8, 32, 1, activation=jnp.tanh, key=jax.random.key(0))
    with pytest.raises(TypeError, match="an Equinox model is called on one example"):
        quantize(model, None, RULE, batches)
    params, static = eqx.partition(model, eqx.is_array)

    def run(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    low = quantize(run, params, RULE, batches)
    assert low.layers[0].weight.qtype.name == "int4"
    plain = octavo.convert(run, params, batches[0], rules=RULE)
    wanted, x = run(params, batches[1]), batches[1]
    error = [float(jnp.mean((octavo.served(run, RULE)(p, x) - wanted) ** 2)) for p in (low, plain)]
    assert error[0] < 0.7 * error[1]


def test_experts_have_statistics_of_their_own_rows_and_starved_ones_the_pooled(batches):
    def moe(params, x, sizes):
        return jax.lax.ragged_dot(x, params["experts"], sizes)

    params, x = {"experts": normal(7, 3, 32, 16)}, jnp.concatenate([*batches, *batches])
    sizes = jnp.asarray([140, 150, 2], jnp.int32)  # and 28 rows of no expert
    with pytest.warns(UserWarning, match="1 of 3 experts of experts saw fewer than 128 tokens"):
        found, missing = collect_statistics(moe, params, [(x, sizes)])
    assert not missing
    stats = found["experts"]
    rows = np.asarray(x)
    for i, own in enumerate((rows[:140], rows[140:290], rows[:292])):
        np.testing.assert_allclose(stats.hessian[i], own.T @ own / len(own), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(stats.mean_abs[i], np.abs(own).mean(axis=0), rtol=1e-4)
        np.testing.assert_allclose(stats.max_abs[i], np.abs(own).max(axis=0), rtol=1e-5)
        assert stats.tokens[i] == len(own)
    with pytest.warns(UserWarning, match="saw fewer"):
        low = quantize(moe, params, RULE, [(x, sizes)])
    plain = octavo.convert(moe, params, x, sizes, rules=RULE)
    assert jax.tree.structure(low) == jax.tree.structure(plain)
    wanted = moe(params, x, sizes)
    error = [
        float(jnp.mean((moe({"experts": p["experts"].dequantize()}, x, sizes) - wanted) ** 2)) for p in (low, plain)
    ]
    assert error[0] < 0.6 * error[1]


def test_bad_data(params, batches):
    with pytest.raises(ValueError, match="there is no calibration data: batches is empty"):
        quantize(predict, params, RULE, [])
    with pytest.raises(ValueError, match="there is no calibration data"):
        collect_statistics(predict, params, iter(()))
    nf4 = RULE.replace(weight_qtype="nf4")
    with pytest.raises(ValueError, match="is quantized to nf4, but 'signed' is for symmetric signed integers"):
        quantize(predict, params, nf4, batches, method="signed", progress=pytest.fail)  # before the first batch
    broken = batches[0].at[3, 4].set(jnp.nan)
    with pytest.raises(
        ValueError, match=r"the inputs of einsum0 at 'layers' \(the weight 'layers/up'\) are not finite"
    ):
        quantize(predict, params, RULE, [broken])


def test_a_weight_whose_inputs_are_not_observed_is_rounded_with_a_warning(batches):
    def fused(params, x):
        q, k = jnp.split(params["qk"], 2, axis=1)
        return (x @ q) * (x @ k) @ params["out"]

    params = {"qk": normal(0, 32, 32), "out": normal(1, 16, 32)}
    with pytest.warns(UserWarning, match="qk is rounded without calibration: the matmul takes a slice"):
        low = quantize(fused, params, RULE, batches)
    wanted = octavo.convert(fused, params, batches[0], rules=RULE)["qk"]
    assert (low["qk"].qvalue == wanted.qvalue).all()


def test_inside_shard_map_the_error_says_so(batches):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharded(params, x):
        spec = jax.sharding.PartitionSpec
        run = jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data"))
        return run(params["w"], x)

    with pytest.raises(ValueError, match="is inside shard_map over"):
        quantize(sharded, {"w": normal(0, 32, 8)}, RULE, batches)


def test_a_weight_that_a_loop_uses_again_sums_over_its_iterations(batches):
    def recurrent(params, x):
        return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ params["w"]), x)

    found, missing = collect_statistics(recurrent, {"w": normal(0, 32, 32)}, batches)
    assert not missing
    assert found["w"].tokens.tolist() == [480.0]


@pytest.mark.slow
def test_stages_see_the_inputs_of_quantized_stages():
    """The drift of the second layer is that of the first one's rounding, and correcting for it helps."""

    def run(params, x):
        return jnp.tanh(x @ params["up"]) @ params["down"]

    params, x = {"up": normal(0, 32, 64) / 4, "down": normal(1, 64, 16)}, normal(2, 512, 32)
    rule = octavo.QuantizationRule(weight_qtype="int3", tile_size=32)
    quantizers = octavo.quantized(run, rule).stored_quantizers(params, x)
    batches = [x[:256], x[256:]]
    low = {name: w.array for name, w in quantize_weights(run, params, quantizers, batches, stages=[["up"], ["down"]])}
    changed = params | {"up": low["up"].dequantize()}
    found, _ = collect_statistics(run, changed, batches, only=["down"], against=params)
    h, h_float = (np.tanh(np.asarray(x @ p["up"], np.float64)) for p in (changed, params))
    np.testing.assert_allclose(found["down"].drift[0], (h_float - h).T @ h / len(x), atol=1e-5)
    np.testing.assert_allclose(found["down"].hessian[0], h.T @ h / len(x), rtol=1e-4, atol=1e-5)
    plain = {name: w.array for name, w in quantize_weights(run, params, quantizers, batches)}
    errors = [np.mean((octavo.served(run, rule)(q, x) - run(params, x)) ** 2) for q in (low, plain)]
    assert errors[0] < errors[1]
    with pytest.raises(ValueError, match="stages have every quantized weight once; 'down' is missing"):
        next(quantize_weights(run, params, quantizers, batches, stages=[["up"]]))


def test_one_weight_at_a_time_where_the_hessians_of_all_do_not_fit(params, batches):
    """Several passes over the data, each with the statistics of some weights; the results are those of one pass."""
    quantizers = octavo.quantized(predict, RULE).stored_quantizers(params, batches[0])
    counts = {}
    found = {}
    for memory in (1 << 30, 1):
        done = []
        found[memory] = dict(
            quantize_weights(predict, params, quantizers, batches, memory=memory, progress=done.append)
        )
        counts[memory] = done
    assert counts == {1 << 30: [1, 2], 1: [1, 2] * len(quantizers)}
    assert len(quantizers) > 3
    for name, one in found[1].items():
        np.testing.assert_array_equal(one.array.qvalue, found[1 << 30][name].array.qvalue, err_msg=name)


def test_an_interrupted_calibration_resumes(params, batches, tmp_path):
    """Stopped after the first of two batches: the second run computes only the second, with the same result."""
    path = tmp_path / "new" / "sums.npz"

    def stop(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_statistics(predict, params, batches, checkpoint=path, progress=stop)
    poisoned = dict(np.load(path))
    found, _ = collect_statistics(predict, params, batches, checkpoint=path)
    wanted, _ = collect_statistics(predict, params, batches)
    for name, one in wanted.items():
        assert np.array_equal(one.hessian, found[name].hessian)
        assert found[name].tokens[0] == 160
    # The sums of the first run are used: with others in their place, the result is another.
    poisoned["sum0"] = poisoned["sum0"] + 1
    np.savez(path, **poisoned)
    again, _ = collect_statistics(predict, params, batches, checkpoint=path)
    assert any(not np.array_equal(again[name].hessian, wanted[name].hessian) for name in wanted)
    for data, weights, message in (
        ([batches[1], batches[0]], params, "is the calibration on other data: remove it"),
        (batches[:1], params, "is the calibration on 2 batches, more than 1: remove it"),
        (batches, params | {"left": 2 * params["left"]}, "is the calibration of other parameters or weights: remove"),
    ):
        with pytest.raises(ValueError, match=message):
            collect_statistics(predict, weights, data, checkpoint=path)
    path.write_bytes(b"no zip")
    with pytest.raises(ValueError, match="is no interrupted calibration, or is damaged: remove it"):
        collect_statistics(predict, params, batches, checkpoint=path)


def test_saved_statistics_take_the_place_of_data(tmp_path):
    def run(params, x):
        return x @ params["w"]

    params, x = {"w": normal(0, 32, 8)}, normal(1, 64, 32)
    rule = octavo.QuantizationRule(weight_qtype="int4", tile_size=32)
    quantizers = octavo.quantized(run, rule).stored_quantizers(params, x)
    found, _ = collect_statistics(run, params, [x])
    save_statistics(tmp_path / "a.npz", found)
    again = load_statistics(tmp_path / "a.npz")
    assert again["w"].view == found["w"].view
    assert again["w"].drift is None
    ((name, low),) = quantize_weights(run, params, quantizers, [], statistics=again)
    ((_, wanted),) = quantize_weights(run, params, quantizers, [x])
    assert name == "w"
    assert np.array_equal(low.array.dequantize(), wanted.array.dequantize())
    other = {"w": jnp.ones((64, 8))}
    with pytest.raises(ValueError, match=r"the statistics of 'w' are for \(1, 32, 8\) weights, but its shape is"):
        next(quantize_weights(run, other, quantizers, [], statistics=again))
    (tmp_path / "b.npz").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="has no statistics of weights, or is damaged"):
        load_statistics(tmp_path / "b.npz")
