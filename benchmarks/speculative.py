"""Tokens per second of a real model with and without a draft: float32 and int8 weights, and drafts of the same weights.

    python benchmarks/speculative.py [--quick] [--json FILE] [--model FILE] [--weights float32,int8] [--kv FORMAT]
        [--drafts int8,int4] [--draft-tokens 3] [--temperature 0] [--tokens 96] [--rounds 3]

The model is SmolLM2-135M (`make data ARGS=smollm2`), whose published weights are 4-bit; they are dequantized to float32
first. Two prompts are answered one after the other, rounds of all engines are interleaved, and the fastest counts. The
answers are compared with those of plain decoding, token by token and by their log probabilities.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from decode import MODEL, PROMPT, with_weights
from timing import Results, arguments, side_by_side

from octavo import kernels
from octavo.pretrained import open_model
from octavo.serve import Engine, KVConfig, SamplingParams

QUESTION = [{"role": "user", "content": "Explain how a lighthouse works, in detail."}]


class Run:
    """An engine, and what it answered."""

    def __init__(self, source, draft: str | None, prompts: list[list[int]], args: argparse.Namespace) -> None:
        options = {} if draft is None else {"draft": draft, "draft_tokens": args.draft_tokens}
        kv = KVConfig.of(args.kv) if args.kv else None
        self.engine = Engine(source, max_length=512, kv=kv, eos_ids=(), **options)
        self.params = SamplingParams(temperature=args.temperature, seed=1, max_tokens=args.tokens + 1)
        self.prompts, self.answers = prompts, []

    def seconds(self) -> float:
        """Seconds per token, without the prompts."""
        self.answers, total = [], 0.0
        self.engine.proposed = self.engine.accepted = 0
        for prompt in self.prompts:
            events = self.engine.generate([prompt], self.params)
            answer = [next(events)]
            begin = time.perf_counter()
            answer += events
            total += time.perf_counter() - begin
            self.answers += answer
        return total / (len(self.answers) - len(self.prompts))

    def same(self, other: "Run") -> tuple[str, str]:
        """How many tokens are those of another run, and the largest difference of their log probabilities."""
        pairs = list(zip(self.answers, other.answers, strict=True))
        equal = [a.token == b.token for a, b in pairs]
        apart = max(abs(a.logprob - b.logprob) for a, b in pairs) if all(equal) else np.nan
        return f"{sum(equal)}/{len(equal)}", f"{apart:.1e}" if apart else "0"


def main() -> None:
    parser = arguments(__doc__, quick="fewer tokens (24) and one round")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--weights", default="float32,int8")
    parser.add_argument("--kv", metavar="FORMAT")
    parser.add_argument("--drafts", default="int8,int4")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = 24, 1
    method = f"{kernels.status()}; {args.tokens} tokens of 2 prompts, {args.draft_tokens} draft tokens, temperature "
    method += f"{args.temperature:g}, cache in {args.kv or 'float32'}; best of {args.rounds} interleaved rounds"
    results = Results(method=method, file=args.json)
    if not Path(args.model).exists():
        results.skip("everything", f"there is no {Path(args.model).name}: make data ARGS=smollm2")
        return
    source = open_model(args.model)
    prompts = [source.tokenizer.chat(QUESTION), list(source.tokenizer.encode(PROMPT))]
    for weights in args.weights.split(","):
        model = with_weights(source, None if weights == "float32" else weights)
        runs = {draft: Run(model, draft, prompts, args) for draft in (None, *args.drafts.split(","))}
        times = side_by_side({str(draft): run.seconds for draft, run in runs.items()}, repeats=args.rounds)
        rows = []
        for draft, run in runs.items():
            timing, engine = times[str(draft)], run.engine
            cells = [f"{1 / timing.seconds:.1f}", f"{times['None'].seconds / timing.seconds:.2f}"]
            if draft is not None:
                cells += [f"{engine.accepted / engine.proposed:.0%}", *run.same(runs[None])]
            cells += [""] * (5 - len(cells))
            rows.append([f"draft {draft}" if draft else "plain", *cells, f"{timing.spread:.0%}"])
        columns = ["", "tokens/s", "plain / it", "accepted", "same tokens", "logprobs apart", "spread"]
        note = f"Decoding of the target: {next(iter(runs.values())).engine.programs.decoding.partition(':')[0]}."
        results.add(f"SmolLM2-135M in {weights}", columns, rows, note, ratios=["plain / it"])


if __name__ == "__main__":
    sys.exit(main())
