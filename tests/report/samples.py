"""Runs of every kind, small and made by hand, for tests of their pages."""

import json

import jax.numpy as jnp
import numpy as np

import octavo
from octavo._tree import flatten_paths
from octavo.models import ModelConfig, abstract_params
from octavo.pretrained import Leaf, PretrainedModel, convert_model, weight_rules
from octavo.qarray.histogram import histogram
from octavo.report import record_conversion
from octavo.report.record import CONVERSION, EVALUATION, write_record
from octavo.train.metrics import MetricWriter
from tests.arrays import random_params

SIZES = {"vocab_size": 64, "emb_dim": 64, "num_query_heads": 2, "num_kv_heads": 1, "head_dim": 32, "mlp_dim": 64}


def source(layers=2):
    """A decoder with weights drawn at random."""
    config = ModelConfig(**SIZES, num_layers=layers, scan_layers=False)
    params = flatten_paths(random_params(abstract_params(config)))
    leaves = {path: Leaf(x.shape, "float32", lambda x=x: np.asarray(x)) for path, x in params.items()}
    return PretrainedModel(config, leaves, origin={"name": "toy", "kind": "test"})


def convert(directory, recipe="int4"):
    """The record of a conversion, in a directory."""
    model = source()
    params, summary = convert_model(model, weight_rules(recipe, model.config))
    place = directory / CONVERSION
    record_conversion(model, params, summary, place, recipe=recipe, command=f"octavo quantize toy {recipe} out")
    return directory


def train(directory, *, recipe="int8", scale=1.01, seconds=0.08, steps=60, layers=3):
    """The files of a training run with telemetry, whose worst matmul is the last."""
    with MetricWriter(directory, run_name=directory.name, tensorboard=False) as writer:
        for step in range(steps):
            found = {
                "learning/loss": scale * (2 + 8 / (1 + step)),
                "perf/step_time_seconds": seconds + 0.01 * (step % 3),
            }
            writer.write(step, found | {"perf/memory_bytes": 3_000_000, "perf/per_device_tokens_per_sec": 1000.0})
            if recipe and step % 10 == 9:
                row = {"saturation": 0.01, "underflow": 0.02 + step / 1000, "sqnr_db": 30.0}
                sites = {f"decoder/layers/{name}/dot_general0": _operands(k, layers) for k, name in enumerate(MATMULS)}
                writer.write_telemetry(step, {"weight": row, "activation": row, "gradient": row, "sites": sites})
    config = {"run_name": directory.name, "quantization": recipe, "steps": steps, "learning_rate": 0.003}
    (directory / "config.yml").write_text(json.dumps(config))
    return directory


MATMULS = ("mlp/wi_0", "mlp/wo", "self_attention/query", "self_attention/out")


def _operands(number, layers):
    return {
        name: {"sqnr_db": [45.0 - 3 * number - layer - 2 * at for layer in range(layers)]}
        for at, name in enumerate(("lhs", "rhs", "dlhs", "drhs"))
    }


FORMATS = {"int8": "int8", "fp8": "float8_e4m3fn", "nvfp4": "nvfp4"}


def _histograms(fmt):
    drawn = np.random.default_rng(0).standard_t(4, size=(64, 64)).astype(np.float32)
    codes = octavo.quantize(jnp.asarray(drawn), fmt, channelwise_axes=(0,))
    return [histogram(f"decoder/layers_{i}/mlp/wo/kernel", drawn, codes, sqnr_db=20.0 + i) for i in range(2)]


def evaluate(directory, *, against="float", perplexity=12.5):
    """The record of an evaluation."""
    measured = lambda mean, error: {"mean": mean, "error": error}  # noqa: E731
    record = {
        "model": directory.name,
        "text": "book.txt",
        "tokens": 4000,
        "seconds": 2.5,
        "perplexity": measured(perplexity, 0.4),
        "loss": measured(2.5257, 0.03),
        "options": {"length": 256, "kv": None},
        "versions": {"octavo": "0"},
    }
    if against:
        record |= {
            "against": against,
            "reference_perplexity": measured(12.3, 0.4),
            "log_ratio": measured(0.0161, 0.002),
            "kl": measured(0.0123, 0.0004),
            "rms_change": 0.021,
            "same_top": measured(0.953, 0.003),
            "layers": [["layers_0", 31.0], ["layers_1", 27.5], ["logits", 29.0]],
        }
    write_record(directory / EVALUATION, record)
    return directory


def comparison(recipes=("int8", "fp8"), seeds=2, steps=30):
    """What a comparison gives."""
    runs, table = [], []
    for number, name in enumerate(("float", *recipes)):
        for seed in range(seeds):
            loss = [[step, (2 + 0.01 * number + 0.02 * seed) + 8 / (1 + step)] for step in range(steps)]
            times = [0.1 - 0.01 * number + 0.001 * (step % 5) for step in range(steps)]
            floats = [0.1 + 0.001 * (step % 5) for step in range(steps)]
            runs.append({"name": name, "seed": seed, "loss": loss, "eval_loss": loss[9::10], "step_seconds": times})
            runs[-1] |= {"float_seconds": floats, "memory_bytes": 1000 - 100 * number}
        if number:
            sites = {f"decoder/layers/{matmul}/dot_general0": _operands(k, 3) for k, matmul in enumerate(MATMULS)}
            first = runs[-seeds]
            first |= {"telemetry": [{"step": steps - 1, "sites": sites}], "histograms": _histograms(FORMATS[name])}
        row = {"name": name, "loss": 2 + 0.01 * number, "gap": 0.005 * number, "gap_low": 0.004 * number}
        row |= {"gap_high": 0.006 * number, "step_ratio": 1 - 0.1 * number, "memory_ratio": 1 - 0.1 * number}
        table.append(row | {"share": 0.9 if number else 0.0})
    return {"steps": steps, "seeds": list(range(seeds)), "runs": runs, "table": table, "config": {"steps": steps}}
