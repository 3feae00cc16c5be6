"""Train a small convolutional network on handwritten digits in low precision, then serve it from low-precision weights.

    python -m octavo.examples.mnist quantization=int8

With `data=FOLDER`, the digits are those of MNIST: `make data ARGS=mnist` fetches its four files into .cache/data/mnist.
The network is a Flax Linen module that takes `conv_general_dilated` and `dot_general` as arguments. Serving uses the
codes that training computed with, so both give the same logits bit for bit.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import octavo
from octavo._names import unknown_name
from octavo.frameworks.linen_ops import ConvGeneralDilated, DotGeneral

try:
    import flax.linen as nn
    import optax
except ModuleNotFoundError as error:
    raise SystemExit("this is a Flax model, and Flax is missing: pip install 'octavo[examples,flax]'") from error

type Data = tuple[jax.Array, jax.Array]

LEARNING_RATE = 5e-3
ADAM = optax.scale_by_adam()

# The config of a matmul and its two gradients. None: float.

CONFIGS: dict[str, octavo.DotConfig | None] = {
    "float": None,
    "int8": octavo.DotConfig.qt("int8"),
    "fp8": octavo.DotConfig.qt("fp8", bwd="e5m2"),
    "int4": octavo.DotConfig.qt("int4", bwd="int8"),
    "int4w": octavo.DotConfig.weight_only("int4"),
}


class Cnn(nn.Module):
    """Two convolutions and two dense layers, all quantized by one config, with static ranges of activations or not."""

    config: octavo.DotConfig | None = None
    static: bool = False

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(ConvGeneralDilated, self.config, self.static)
        dot = functools.partial(DotGeneral, self.config, self.static)
        x = nn.relu(nn.Conv(32, (3, 3), conv_general_dilated_cls=conv)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(32, (3, 3), conv_general_dilated_cls=conv)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2)).reshape(len(x), -1)
        x = nn.relu(nn.Dense(64, dot_general_cls=dot)(x))
        return nn.Dense(10, dot_general_cls=dot)(x)


# Training: Adam, with a learning rate that falls to zero.


def loss(params: Any, model: Cnn, x: jax.Array, y: jax.Array) -> jax.Array:
    logits: Any = model.apply({"params": params}, x)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


# Jitted by the step: inside of `scan`, XLA's convolutions are slow on CPUs.
@functools.partial(jax.jit, static_argnames="model")
def step(params: Any, state: Any, model: Cnn, x: jax.Array, y: jax.Array, rate: jax.Array):
    value, grads = jax.value_and_grad(loss)(params, model, x, y)
    updates, state = ADAM.update(grads, state)
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, value


def train(model: Cnn, data: Data, *, epochs: int, batch: int, seed: int) -> Any:
    """Parameters, trained from scratch."""
    x, y = map(np.asarray, data)
    params = jax.jit(model.init)(jax.random.key(seed), x[:1])["params"]
    state, rng, start = ADAM.init(params), np.random.default_rng(seed), time.perf_counter()
    for epoch in range(epochs):
        rows = rng.permutation(len(x))[: len(x) // batch * batch].reshape(-1, batch)
        value = jnp.float32(0)
        for number, picked in enumerate(rows):
            rate = jnp.float32(LEARNING_RATE * (1 - (epoch + number / len(rows)) / epochs))
            params, state, value = step(params, state, model, x[picked], y[picked], rate)
        if (epoch + 1) % max(1, epochs // 3) == 0:
            print(f"epoch {epoch + 1:3}   loss {value:.4f}   {time.perf_counter() - start:.1f} s", flush=True)
    return params


# Calibration: only the forward pass, which collects the ranges of activations.


def calibrate(model: Cnn, params: Any, x: np.ndarray, *, steps: int, batch: int) -> Any:
    """The statistics of static ranges, from batches of digits; none if the model has no static ranges."""
    if not model.static or model.config is None:
        return {}
    run = jax.jit(functools.partial(model.apply, mutable="quant_stats"))
    variables = {**jax.jit(model.init)(jax.random.key(0), x[:batch]), "params": params}
    for i in range(steps):
        rows = np.arange(i * batch, (i + 1) * batch) % len(x)
        _, stats = run(variables, x[rows])
        variables |= stats
    return {"quant_stats": variables["quant_stats"]}


# Serving: the same network, its weights stored as codes and scales.


def convert(model: Cnn, params: Any, x: jax.Array) -> tuple[Any, Any]:
    """The model that takes weights in low precision, and those weights; two codes of four bits share a byte."""
    # No rules: the config of each matmul determines how its weight is stored.
    served = octavo.quantize_model(model, octavo.PtqProvider(()))
    abstract = jax.eval_shape(served.init, jax.random.key(0), x)["params"]
    stored = octavo.quantize_params(params, abstract)
    pack = lambda w: dataclasses.replace(w, array=w.array.pack()) if is_quantized(w) else w  # noqa: E731
    return served, jax.tree.map(pack, stored, is_leaf=is_quantized)


def is_quantized(x: Any) -> bool:
    return isinstance(x, octavo.WithAux)


def size(params: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(params, is_leaf=is_quantized))


class Found(NamedTuple):
    """What a run found: percent of the held-out digits, and bytes of the parameters."""

    trained: float
    served: float
    float_bytes: int
    served_bytes: int


def run(quantization: str, data: tuple[Data, Data], *, epochs: int, batch: int, seed: int, steps: int = 0) -> Found:
    """Train, calibrate for some steps, convert, and hold both models against the digits that were kept back."""
    model, (x, y) = Cnn(CONFIGS[quantization]), data[1]
    params = train(model, data[0], epochs=epochs, batch=batch, seed=seed)
    model = dataclasses.replace(model, static=steps > 0)
    stats = calibrate(model, params, np.asarray(data[0][0]), steps=steps, batch=batch)
    served, stored = convert(model, params, x)
    logits = [jax.jit(m.apply)({"params": p, **stats}, x) for m, p in ((model, params), (served, stored))]
    np.testing.assert_array_equal(logits[1], logits[0], "the served logits are not those of the trained model")
    trained, low = (float(100 * np.mean(np.argmax(z, axis=1) == y)) for z in map(np.asarray, logits))
    return Found(trained, low, size(params), size(stored))


# The data, and the command.


def digits() -> tuple[Data, Data]:
    """1797 images of 8 x 8 pixels, half of them to train on and half to test on."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise SystemExit(
            "the digits come with scikit-learn, which is missing: pip install 'octavo[examples]'"
        ) from error
    images, labels = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(images))
    x, y = jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order], jnp.int32)
    x, half = x.reshape(-1, 8, 8, 1), len(x) // 2
    return (x[:half], y[:half]), (x[half:], y[half:])


def mnist(folder: str) -> tuple[Data, Data]:
    """The 60,000 training images and the 10,000 test images of MNIST's idx files, of 28 x 28 pixels."""
    if missing := [name for name in IDX if not Path(folder, name).is_file()]:
        _usage_error(f"data={folder} has no {missing[0]}; 'make data ARGS=mnist' fetches MNIST into .cache/data/mnist")
    train_x, train_y, test_x, test_y = (read_idx(Path(folder, name)) for name in IDX)
    scaled = lambda x, y: (jnp.asarray(x[..., None], jnp.float32) / 255, jnp.asarray(y, jnp.int32))  # noqa: E731
    return scaled(train_x, train_y), scaled(test_x, test_y)


IDX = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def read_idx(path: Path) -> np.ndarray:
    """The bytes of an idx file: two zeros, the type (8, bytes), the rank, then the shape in big-endian int32."""
    content = path.read_bytes()
    rank = content[3] if content[:3] == b"\0\0\x08" else 0
    shape = np.frombuffer(content, ">i4", rank, 4)
    if not rank or len(content) != 4 + 4 * rank + np.prod(shape, dtype=np.int64):
        _usage_error(f"{path} is no idx file of bytes")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


DEFAULTS: dict[str, str | int] = {
    "quantization": "int8",
    "data": "digits",
    "examples": 0,
    "epochs": 20,
    "batch": 32,
    "calibrate": 0,
    "seed": 0,
    "seeds": 1,
}
LEAST = {"examples": 0, "epochs": 1, "batch": 1, "calibrate": 0, "seed": 0, "seeds": 1}
HELP = f"""
  quantization  {", ".join(CONFIGS)}
  data          digits (scikit-learn's), or a folder with the files of MNIST
  examples      training digits, the first ones; 0: all
  epochs        times through the training digits
  batch         digits in a step
  calibrate     steps that collect static ranges of activations; 0: ranges of each batch
  seed          of the initial weights and the batches
  seeds         how many runs, with this seed and those after it
By default: {" ".join(f"{k}={v}" for k, v in DEFAULTS.items())}"""


def parse(args: Sequence[str], largest_batch: int) -> dict[str, Any]:
    """`key=value` arguments over the defaults; a SystemExit that says what is wrong with them."""
    options = dict(DEFAULTS)
    for arg in args:
        key, equals, value = arg.partition("=")
        if key not in DEFAULTS:
            _usage_error(f"there is no argument {arg!r}; {unknown_name(key.lstrip('-'), DEFAULTS)}")
        if not equals:
            _usage_error(f"{key!r} needs a value: {key}={DEFAULTS[key]}")
        if key == "quantization":
            if value not in CONFIGS:
                _usage_error(f"there is no {arg}; {unknown_name(value, CONFIGS)}")
            options[key] = value
            continue
        if key == "data":
            options[key] = value
            continue
        least, most = LEAST[key], largest_batch if key == "batch" else 2**31
        if not value.isdecimal() or not least <= int(value) <= most:
            upper = f"to {most}" if key == "batch" else "up"
            _usage_error(f"{arg} is not a whole number from {least} {upper}: try {key}={DEFAULTS[key]}")
        options[key] = int(value)
    return options


def _usage_error(message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(2)


def main(args: Sequence[str] | None = None) -> list[Found]:
    args = sys.argv[1:] if args is None else args
    if {"-h", "--help"} & set(args):
        print(f"{__doc__}{HELP}")
        return []
    source = dict(arg.split("=", 1) for arg in args if "=" in arg).get("data", "digits")
    train_data, test_data = digits() if source == "digits" else mnist(source)
    options = parse(args, len(train_data[0]))
    count = options["examples"] or None
    train_data = train_data[0][:count], train_data[1][:count]
    name, first = options["quantization"], options["seed"]
    found = []
    for seed in range(first, first + options["seeds"]):
        print(f"quantization {name}, seed {seed}: training on {len(train_data[0])} digits", flush=True)
        found.append(
            run(
                name,
                (train_data, test_data),
                epochs=options["epochs"],
                batch=options["batch"],
                seed=seed,
                steps=options["calibrate"],
            )
        )
        report(found[-1], len(test_data[0]))
    if len(found) > 1:
        mean, spread = np.mean([f.served for f in found]), np.std([f.served for f in found], ddof=1)
        print(f"{len(found)} seeds of {name}: {mean:.2f} % on average, standard deviation {spread:.2f} points\n")
    other = "int8" if name == "float" else "float"
    print(f"Next: python -m octavo.examples.mnist quantization={other:6} the same digits in {other}")
    print(f"      python -m octavo.examples.mnist quantization={name} seeds=10   how much is chance")
    return found


def report(found: Found, count: int) -> None:
    bits = 32 * found.served_bytes / found.float_bytes
    print(f"  trained   {found.trained:.2f} % of {count} held-out digits")
    print(f"  served    {found.served:.2f} %, the same logits bit for bit")
    print(f"  weights   {found.float_bytes:,} bytes trained, {found.served_bytes:,} served: {bits:.2f} bits each\n")


if __name__ == "__main__":
    main()
