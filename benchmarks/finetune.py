"""Fine-tuning a pretrained model: bytes of the training state of full, LoRA and QLoRA training; with --steps, losses.

    python benchmarks/finetune.py MODEL --text FILE [--steps 100] [--rank 16] [--length 128] [--batch 4]

The state is what stays in memory between steps: trained and frozen parameters, and AdamW's moments. Gradients are those
of trained parameters. With --steps, all three start from the same model and see the same batches; losses are those of
held-out text, and times include everything but compiling.
"""

import argparse
import time

import jax
import jax.numpy as jnp

from octavo.train import Config, Trainer
from octavo.train.program import Program

WAYS = {"full": {}, "LoRA": {"lora_rank": 16}, "QLoRA nf4": {"lora_rank": 16, "lora_weight_qtype": "nf4"}}


def nbytes(tree) -> int:
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    for name, default in (("steps", 0), ("rank", 16), ("length", 128), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    common = {
        "load_parameters_path": given.model, "dataset_type": "text", "dataset_path": given.text, "num_devices": 1,
        "max_target_length": given.length, "per_device_batch_size": given.batch, "steps": max(1, given.steps),
    }  # fmt: skip
    full = 0
    for name, keys in WAYS.items():
        rate = 1e-5 if name == "full" else 2e-4
        keys = {**keys, "lora_rank": given.rank} if keys else keys
        config = Config(**common, **keys, learning_rate=rate)
        state = Program(config).abstract_state
        sizes = [nbytes(part) for part in (state.params, state.frozen, state.opt_state, state.params)]
        full = full or sum(sizes)
        text = ", ".join(
            f"{what} {size / 2**20:.1f} MiB"
            for what, size in zip(("trained", "frozen", "moments", "gradients"), sizes, strict=True)
        )
        print(f"{name}: {text}; together {sum(sizes) / 2**20:.1f} MiB, {sum(sizes) / full:.3f} of full", flush=True)
        if given.steps:
            trainer = Trainer(config)
            before, _ = trainer.evaluate(), trainer.compiled("train", 0)
            start = time.perf_counter()
            for _ in range(given.steps):
                metrics = trainer.step()
            jax.block_until_ready(metrics)
            speed = given.steps * given.batch * given.length / (time.perf_counter() - start)
            print(f"  held-out loss {before:.4f} -> {trainer.evaluate():.4f}, {speed:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
