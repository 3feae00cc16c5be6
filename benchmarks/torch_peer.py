"""torch and torchao, timed between our rounds: `octavo`'s benchmarks start this in an interpreter that has them.

    PYTHON benchmarks/torch_peer.py    (reads a line of JSON for each request, answers with one)

A request `{"make": key, "kind": ..., "shape": [m, k, n]}` prepares a linear layer, `{"run": key}` answers with the
seconds of one call. It imports nothing of Octavo or JAX. Compiled by inductor, as torchao's own pages ask for.
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

import torch  # noqa: E402


def linear(kind, m, k, n):
    """A call of one linear layer on m rows, k inputs and n outputs."""
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


def versions():
    try:
        import torchao

        return f"torch {torch.__version__}, torchao {torchao.__version__}"
    except ImportError:
        return f"torch {torch.__version__}, no torchao"


def main():
    print(json.dumps(versions()), file=ANSWERS, flush=True)
    calls = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "make" in request:
                calls[request["make"]] = linear(request["kind"], *request["shape"])
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
