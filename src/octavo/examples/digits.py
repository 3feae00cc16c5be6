"""Train a small network on handwritten digits twice: in float32, and with every matmul in int8.

    python -m octavo.examples.digits

A matmul and its two gradients are three matmuls. In the quantized run each of them multiplies int8 by int8 and
accumulates in int32; scales, biases and the optimizer are in float32. Both runs see the same batches.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import octavo

SIZES = (64, 256, 128, 10)
BATCH = 64
LEARNING_RATE = 2e-3

type Params = list[dict[str, jax.Array]]
type Data = tuple[jax.Array, jax.Array]


# The quantized matmul: one config for the matmul and its two gradients.

INT8 = octavo.DotConfig.qt("int8")


def int8_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w`, and both gradients of it, in int8."""
    return octavo.dot(x, w, config=INT8)


# The network, its loss, and Adam.


def init(key: jax.Array) -> Params:
    shapes = list(itertools.pairwise(SIZES))
    keys = jax.random.split(key, len(shapes))
    return [
        {"w": jax.random.normal(k, (m, n)) * np.sqrt(2 / m), "b": jnp.zeros((1, n))}
        for k, (m, n) in zip(keys, shapes, strict=True)
    ]


def network(params: Params, x: jax.Array, matmul: Callable) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(matmul(x, layer["w"]) + layer["b"])
    return matmul(x, params[-1]["w"]) + params[-1]["b"]


def loss(params: Params, batch: Data, matmul: Callable) -> jax.Array:
    x, y = batch
    logits = jax.nn.log_softmax(network(params, x, matmul))
    return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))


def adam(params: Params, grads: Params, state: tuple[Params, Params, jax.Array]):
    mean, square, step = state
    step = step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, square, grads)
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
    return params, (mean, square, step)


@functools.partial(jax.jit, static_argnames="matmul")
def epoch(params: Params, state, train: Data, key: jax.Array, matmul: Callable):
    """Once through the training data in random order."""
    x, y = train
    order = jax.random.permutation(key, len(x))[: len(x) // BATCH * BATCH].reshape(-1, BATCH)

    def step(carry, rows):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, (x[rows], y[rows]), matmul)
        return adam(params, grads, state), value

    (params, state), losses = jax.lax.scan(step, (params, state), order)
    return params, state, jnp.mean(losses)


@functools.partial(jax.jit, static_argnames="matmul")
def accuracy(params: Params, test: Data, matmul: Callable) -> jax.Array:
    """Percent of the test images whose digit is found."""
    x, y = test
    return 100 * jnp.mean(jnp.argmax(network(params, x, matmul), axis=1) == y)


# Data, training, the comparison.


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
    half = len(x) // 2
    return (x[:half], y[:half]), (x[half:], y[half:])


def train(name: str, matmul: Callable, data: tuple[Data, Data], *, epochs: int, seed: int) -> float:
    """Train from scratch, and give the accuracy on the test images."""
    key, first = jax.random.split(jax.random.key(seed))
    params = init(first)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = (zeros, zeros, jnp.float32(0))
    start = time.perf_counter()
    for number, part in enumerate(jax.random.split(key, epochs), start=1):
        params, state, value = epoch(params, state, data[0], part, matmul)
        if number % max(1, epochs // 4) == 0:
            found = accuracy(params, data[1], matmul)
            seconds = time.perf_counter() - start
            print(f"{name:8} epoch {number:3}   loss {value:.4f}   test {found:.2f} %   {seconds:.1f} s", flush=True)
    return float(accuracy(params, data[1], matmul))


def main(args: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m octavo.examples.digits", description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40, help="times through the training data (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches (default: 0)")
    options = parser.parse_args(args)

    data = digits()
    found = {
        name: train(name, matmul, data, epochs=options.epochs, seed=options.seed)
        for name, matmul in {"float32": jnp.matmul, "int8": int8_matmul}.items()
    }
    count = len(data[1][0])
    difference = f"{found['int8'] - found['float32']:+.2f} points; one image is {100 / count:.2f}"
    print(f"\nTest accuracy on {count} images after {options.epochs} epochs, seed {options.seed}:")
    print(f"  float32  {found['float32']:.2f} %")
    print(f"  int8     {found['int8']:.2f} %   ({difference})")
    print(f"\nNext: python -m octavo.examples.digits --seed {options.seed + 1}    how much of the difference is chance")
    print("      python -m octavo doctor                      which number types this machine multiplies fast")
    return found


if __name__ == "__main__":
    main()
