"""`quantize_params`: checkpoints become what a quantized model holds, leaf by leaf."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import Quantizer, quantize
from octavo.frameworks import params as module
from octavo.frameworks.params import WithAux, quantize_params, unwrap
from tests.arrays import normal

HOW = Quantizer("int8", channelwise_axes=(1,))


def _abstract(shape=(8, 4)):
    def make():
        w = jnp.ones(shape)
        how = HOW.replace(channelwise_axes=tuple(a for a in range(len(shape)) if a != len(shape) - 2))
        return {"layer": {"kernel": WithAux(how.quantize(w), how), "bias": jnp.ones(shape[-1])}}

    return jax.eval_shape(make)


def _params(shape=(8, 4)):
    return {"layer": {"kernel": normal(0, *shape), "bias": jnp.zeros(shape[-1])}}


def test_leaves_become_what_the_model_holds_and_the_rest_stays():
    params = _params()
    made = quantize_params(params, _abstract())
    expected = quantize(params["layer"]["kernel"], "int8", channelwise_axes=(1,))
    jax.tree.map(np.testing.assert_array_equal, made["layer"]["kernel"].array, expected)
    assert made["layer"]["kernel"].how == HOW
    assert made["layer"]["bias"] is params["layer"]["bias"]


def test_numpy_leaves_are_accepted():
    params = jax.tree.map(np.asarray, _params())
    made = quantize_params(params, _abstract())
    reference = quantize_params(_params(), _abstract())
    jax.tree.map(np.testing.assert_array_equal, made, reference)


def test_c1_stacked_layers_keep_a_scale_per_layer():
    made = quantize_params(_params((3, 8, 4)), _abstract((3, 8, 4)))
    assert made["layer"]["kernel"].array.scale.shape == (3, 1, 4)


def test_quantized_leaves_stay_quantized():
    once = quantize_params(_params(), _abstract())
    assert quantize_params(once, _abstract())["layer"]["kernel"] is once["layer"]["kernel"]


def test_it_runs_under_jit_and_eval_shape():
    abstract = _abstract()
    made = jax.jit(lambda p: quantize_params(p, abstract))(_params())
    jax.tree.map(np.testing.assert_array_equal, made, quantize_params(_params(), abstract))
    assert jax.eval_shape(lambda p: quantize_params(p, abstract), _params())["layer"]["kernel"].shape == (8, 4)


def test_an_extra_parameter_is_named_or_left_out():
    params = _params() | {"head": {"kernel": jnp.ones((2, 2))}}
    with pytest.raises(ValueError, match=r"no parameter 'head/kernel'.*allow_extra_params=True"):
        quantize_params(params, _abstract())
    assert set(quantize_params(params, _abstract(), allow_extra_params=True)) == {"layer"}


def test_a_part_of_the_parameters_can_be_converted_at_a_time():
    part = quantize_params({"layer": {"kernel": jnp.ones((8, 4))}}, _abstract())
    assert set(part["layer"]) == {"kernel"}


def test_a_shape_mismatch_names_the_path():
    with pytest.raises(ValueError, match=r"'layer/kernel' has the shape \(7, 4\), but the model needs \(8, 4\)"):
        quantize_params(_params((7, 4)), _abstract())


def test_what_is_no_array_is_named():
    with pytest.raises(TypeError, match="'layer/bias' is no array but a str"):
        quantize_params({"layer": {"kernel": jnp.ones((8, 4)), "bias": "b"}}, _abstract())


def test_donated_parameters_are_freed_one_by_one(monkeypatch):
    """At no time do the float model and the quantized one take more than 1.2 times the float model."""
    shape, count = (256, 256), 10
    params = {str(i): normal(i, *shape) for i in range(count)}
    abstract = jax.eval_shape(lambda: {str(i): WithAux(HOW.quantize(jnp.ones(shape)), HOW) for i in range(count)})
    floats = sum(x.nbytes for x in params.values())
    others = sum(x.nbytes for x in jax.live_arrays()) - floats
    seen, original = [], module._quantize

    def watched(x, quantizer):
        codes = original(x, quantizer)
        seen.append(sum(a.nbytes for a in jax.live_arrays()) - others)
        return codes

    monkeypatch.setattr(module, "_quantize", watched)
    made = quantize_params(params, abstract, donate=True)
    assert len(seen) == count
    assert max(seen) <= 1.2 * floats
    assert all(x.is_deleted() for x in params.values())
    assert sum(x.array.nbytes for x in made.values()) < 0.3 * floats


def test_boxes_of_linen_are_no_part_of_a_path_nor_of_the_result():
    def make():
        q = HOW.quantize(jnp.ones((8, 4)))
        boxed = jax.tree.map(lambda x: nn.Partitioned(x, (None, "model")), q)
        return {"layer": {"kernel": WithAux(boxed, HOW), "bias": nn.Partitioned(jnp.ones(4), (None,))}}

    made = quantize_params(_params(), jax.eval_shape(make))
    jax.tree.map(np.testing.assert_array_equal, made, quantize_params(_params(), _abstract()))


def test_unwrap_gives_the_qarrays():
    made = quantize_params(_params(), _abstract())
    assert unwrap(made)["layer"]["kernel"] is made["layer"]["kernel"].array


def test_a_stored_parameter_looks_like_its_array():
    kernel = quantize_params(_params(), _abstract())["layer"]["kernel"]
    assert (kernel.shape, kernel.ndim, kernel.dtype) == ((8, 4), 2, jnp.float32)
    assert kernel.nbytes == 8 * 4 + 4 * 4
    assert repr(kernel).startswith("WithAux(array=QArray(int8[8,4]")
    assert repr(kernel).endswith("how=Quantizer('int8', channelwise_axes=(1,)))")
    np.testing.assert_array_equal(kernel.dequantize(), kernel.array.dequantize())
