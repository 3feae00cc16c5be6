"""Four bits by calibration and by training: GPTQ, GPTQ with trained scales, and QAT with the float model as teacher.

    python benchmarks/qat.py MODEL --data train.txt --text held-out.txt [--told 200] [--steps 300] [--rate 1e-4]

Files that do not exist yet are written first, with texts that the model tells: 200 to train on, 16 held out. All are
int4 in groups of 32 on the same text, with the embedding table and the logits in float. QAT trains all weights and the
scales (LSQ) with the KL divergence as loss. Its run is exported, read back and compared with the program of training
bit by bit; its GGUF file (Q4_0) is read back too, and its codes are compared.
"""

import argparse
import functools
import math
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ptq import tell

import octavo
from octavo._tree import flatten_paths
from octavo.pretrained import (
    CalibrationData,
    PretrainedModel,
    Request,
    convert_model,
    export_model,
    open_model,
    weight_rules,
)
from octavo.pretrained.calibrated import calibrated_codes, distilled
from octavo.pretrained.convert import logits
from octavo.qarray import is_qarray
from octavo.rules import rules_to_json
from octavo.serve.evaluate import evaluate
from octavo.train import Config, train

FORMAT = "int4:g32"


def trained(path: str, given: argparse.Namespace, folder: Path) -> PretrainedModel:
    """A model after quantization-aware training, exported and read back."""
    rules, out = folder / "rules.json", folder / "low"
    rules.write_text(rules_to_json(weight_rules(f"{FORMAT}:{given.scales}", open_model(path).config, head="float")))
    config = Config(
        run_name="qat", base_output_directory=str(folder), load_parameters_path=path, dataset_type="text",
        dataset_path=given.data, quantization_rules_path=str(rules), distillation_weight=1.0, steps=given.steps,
        learning_rate=given.rate, per_device_batch_size=given.batch, max_target_length=256, num_devices=1,
        eval_interval=0, adam_weight_decay=0.0, quantization_metrics_interval=0, enable_tensorboard=False,
        checkpoint_period=10**6,
    )  # fmt: skip
    train(config, log=functools.partial(_log, every=max(1, given.steps // 6)))
    run = open_model(folder / "qat")
    export_model("octavo", run, out, Request("trained"))
    export_model("gguf", run, folder / "low.gguf", Request("trained", head="f32"))
    low, other = open_model(out), open_model(folder / "low.gguf")
    params = low.params("float32")
    fn, tokens = functools.partial(logits, low.config), jnp.arange(3, 131)[None]
    quantized = octavo.quantized(fn, run.rules, weights="params").stateful(run.state)
    before = jax.jit(lambda params: quantized(params, tokens)[0])(run.params("float32"))
    after = jax.jit(octavo.served(fn, run.rules))(params, tokens)
    print(f"  the exported model gives the logits of training bit by bit: {bool(jnp.all(before == after))}")
    codes = {path: q for path, q in flatten_paths(params, is_qarray).items() if is_qarray(q)}
    same = [np.array_equal(other.leaves[p].load().unpack().qvalue, q.unpack().qvalue) for p, q in codes.items()]
    print(f"  {sum(same)} of {len(same)} weights have the same codes in the GGUF file", flush=True)
    return PretrainedModel.from_params(
        low.config, flatten_paths(params, is_qarray), tokenizer=low.tokenizer, origin=low.origin
    )


def _log(line: str, every: int) -> None:
    if line.startswith("completed step: ") and int(line.split()[2].strip(",")) % every == 0:
        print(f"  {line.partition(', seconds')[0]}, loss {line.rpartition(' loss: ')[2]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, kind, default in (("steps", int, 300), ("rate", float, 1e-4), ("batch", int, 2)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--told", type=int, default=200, help="texts that the model tells where --data does not exist")
    parser.add_argument("--scales", default="lsq", help="lsq trains them; another calibration measures them")
    parser.add_argument("--data", required=True, help="the text of calibration and training")
    parser.add_argument("--text", required=True, help="the text of the evaluation")
    parser.add_argument("--only", choices=("gptq", "qat"), help="only one of them")
    given = parser.parse_args()
    source = open_model(given.model)
    if not (Path(given.data).exists() and Path(given.text).exists()):
        told = tell(source, given.told + 16)
        Path(given.data).write_text("\n\n".join(told[:-16]), encoding="utf-8")
        Path(given.text).write_text("\n\n".join(told[-16:]), encoding="utf-8")
    ids = source.tokenizer.encode(Path(given.text).read_text(encoding="utf-8"))
    print(f"{source.describe()}; {len(ids)} tokens", flush=True)

    def report(name: str, low: PretrainedModel, start: float) -> None:
        seconds = time.process_time() - start
        found = evaluate(low, ids, against=source, layers=False)
        kl = f"{found.kl.mean:.4f} ± {found.kl.error:.4f}"
        change = f"{math.expm1(found.log_ratio.mean):+.2%} ± {found.log_ratio.error:.2%}"
        print(
            f"{name:24} KL {kl}, perplexity {change}, same top {found.same_top.mean:.1%}, {seconds:.0f} CPU s",
            flush=True,
        )

    distill = None
    if given.only != "qat":
        start, data = time.process_time(), CalibrationData(Path(given.data).read_text(encoding="utf-8"))
        rules = weight_rules(FORMAT, source.config, head="float")
        codes = calibrated_codes(source, rules, data, method="gptq")
        params, _ = convert_model(source, rules, codes=codes)
        as_model = functools.partial(PretrainedModel.from_params, source.config, tokenizer=source.tokenizer)
        report("GPTQ", as_model(params), start)
        distill = functools.partial(distilled, source, params, rules, data, steps=given.steps)
    if given.only != "gptq":
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            report(f"QAT, {given.scales}", trained(given.model, given, Path(folder)), start)
    if distill is not None:
        start = time.process_time()
        report("GPTQ, scales distilled", as_model(distill()), start)


if __name__ == "__main__":
    main()
