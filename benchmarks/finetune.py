"""Fine-tuning a pretrained model: memory of full, LoRA and QLoRA training; with --steps, peak memory, losses and speed.

    python benchmarks/finetune.py MODEL --text FILE [--steps 60] [--rank 16] [--length 128] [--batch 4] [--way QLoRA]

The state is what stays in memory between steps: trained and frozen parameters, and AdamW's moments. Gradients are those
of trained parameters. With --steps, each way runs in a process of its own, from the same model, on the same batches:
what a step needs is its arguments and temporary arrays as compiled (activations are recomputed, by --remat), peak
memory is the largest resident set of that process after its first step, losses are those of held-out text at
four points, and times are those of steps without the first, which compiles; CPU seconds hardly depend on the load.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from octavo.pretrained.memory import peak_memory
from octavo.train import Config, Trainer
from octavo.train.program import Program

WAYS = {
    "full": {},
    "LoRA": {"lora_weight_qtype": ""},
    "QLoRA": {"lora_weight_qtype": "nf4_double"},
    "LoftQ": {"lora_weight_qtype": "nf4_double", "lora_init": "loftq"},
    "GPTQ": {"lora_weight_qtype": "nf4_double", "lora_init": "gptq"},
    "EoRA": {"lora_weight_qtype": "nf4_double", "lora_init": "eora"},
}
RATE = 5e-4
"""The learning rate of adapters; that of all weights is a tenth."""
POINTS = 4


def nbytes(tree) -> int:
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def sizes(config: Config) -> str:
    state = Program(config).abstract_state
    names = ("trained", "frozen", "moments", "gradients")
    found = [nbytes(part) for part in (state.params, state.frozen, state.opt_state, state.params)]
    text = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in zip(names, found, strict=True))
    return f"{text}; together {sum(found) / 2**20:.1f} MiB"


def train(config: Config) -> None:
    trainer = Trainer(config)
    memory = trainer.compiled("train", 0).memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    print(
        f"  a step needs {needed / 2**20:.0f} MiB, {memory.temp_size_in_bytes / 2**20:.0f} of them temporary",
        flush=True,
    )
    print(f"  held-out loss {trainer.evaluate():.4f}", end="", flush=True)
    jax.block_until_ready(trainer.step())
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on: without loading and compiling
    seconds, busy, peak = 0.0, 0.0, 0
    for point in range(1, POINTS + 1):
        start, cpu = time.perf_counter(), time.process_time()
        while trainer.now < config.steps * point // POINTS:
            metrics = jax.block_until_ready(trainer.step())
        seconds, busy = seconds + time.perf_counter() - start, busy + time.process_time() - cpu
        peak = peak or peak_memory()  # of training alone: evaluations come after
        print(f" {trainer.evaluate():.4f}", end="", flush=True)
    tokens = (config.steps - 1) * float(metrics["learning/total_weights"])
    print(
        f"\n  peak {peak / 2**20:.0f} MiB, {tokens / seconds:.0f} tokens/s, {tokens / busy:.0f} per CPU second",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--way", choices=tuple(WAYS), help="only one, in this process")
    parser.add_argument("--rate", type=float, help="the learning rate, instead of that of the way")
    parser.add_argument("--remat", default="full", help="the trainer's remat_policy")
    for name, default in (("steps", 0), ("rank", 16), ("length", 128), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.way is None:
        for way in WAYS:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--way", way], check=True)
        return
    config = Config(
        load_parameters_path=given.model, dataset_type="text", dataset_path=given.text, num_devices=1,
        max_target_length=given.length, per_device_batch_size=given.batch, steps=max(1, given.steps), eval_steps=8,
        remat_policy=given.remat,
        learning_rate=given.rate or (RATE if WAYS[given.way] else RATE / 10),
        lora_rank=given.rank if WAYS[given.way] else 0, **WAYS[given.way],
    )  # fmt: skip
    print(f"{given.way}: {sizes(config)}", flush=True)
    if given.steps > 1:
        train(config)


if __name__ == "__main__":
    main()
