"""torch and torchao, timed between our rounds: the benchmarks start this in an interpreter that has them.

    PYTHON benchmarks/torch_peer.py    (reads a line of JSON for each request, answers with one)

A request `{"make": key, "what": "linear" or "step", "kind": ..., "sizes": ...}` prepares a call, `{"run": key}` answers
with the seconds of one. It imports nothing of Octavo or JAX. Compiled by inductor, as torchao's own pages ask for.
"""

import json
import os
import sys
import time
import warnings

# Answers go to where stdout was; whatever torch prints goes to stderr.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
warnings.simplefilter("ignore")
# In this process: compiler processes that outlive it would count as other load.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch  # noqa: E402
import torch_step  # noqa: E402


def linear(kind, sizes):
    """A call of one linear layer on m rows, k inputs and n outputs."""
    m, k, n = sizes
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False)).eval()
    x = torch.randn(m, k)
    if kind != "float32":
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

        configs = {"int8": Int8DynamicActivationInt8WeightConfig, "int8 weights": Int8WeightOnlyConfig}
        quantize_(layer, configs[kind]())
    layer = torch.compile(layer)

    def call():
        with torch.no_grad():
            layer(x)

    return call


MAKERS = {"linear": linear, "step": torch_step.step}


def versions():
    try:
        import torchao

        return f"torch {torch.__version__}, torchao {torchao.__version__}"
    except ImportError:
        return f"torch {torch.__version__}"


def main():
    print(json.dumps(versions()), file=ANSWERS, flush=True)
    calls = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "make" in request:
                calls[request["make"]] = MAKERS[request["what"]](request["kind"], request["sizes"])
                calls[request["make"]]()
                answer = 0.0
            else:
                call = calls[request["run"]]
                begin = time.perf_counter()
                call()
                answer = time.perf_counter() - begin
        except Exception as error:
            answer = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
