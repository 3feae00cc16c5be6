"""Which number types does this backend support in a dot, and how fast is it?

Measured in a child process, `python -m octavo.cli.probe`: XLA prints stack traces for a dot that it does not support
and may abort on one that it half supports. The child writes one JSON object per line, which the parent reads.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence

DTYPES = (
    "float32", "bfloat16", "float16", "int8", "uint8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn",
)  # fmt: skip
SHAPE = (512, 1024, 512)
ROUNDS = 30
# Timings of a dot vary by a few percent between runs; a smaller speedup is not significant.
GAIN = 1.1

_COMMAND = (sys.executable, "-m", "octavo.cli.probe")


NO_ANSWER = "no answer in"


def probe(command: Sequence[str] = _COMMAND, timeout: float = 15.0) -> dict:
    """Try every type and return `{"error", "platform", "devices", "kernels", "dots"}`.

    A type at which the child crashes or hangs is reported as unsupported and skipped in the next attempt.
    """
    unsupported: dict[str, str] = {}
    while True:
        events, died = _child([*command, *unsupported], timeout)
        info, dots, trying = {}, {}, None
        for event in events:
            trying = event.pop("trying", None)
            dots |= event.pop("dots", {})
            info |= event
        if died is None or trying is None or trying in unsupported:
            break
        unsupported[trying] = died
    dots |= {name: _unsupported(reason) for name, reason in unsupported.items()}
    return {
        "error": died,
        "platform": info.get("platform"),
        "devices": info.get("devices", []),
        "kernels": info.get("kernels"),
        "dots": {name: _with_verdict(dots[name], dots) for name in DTYPES if name in dots},
    }


def short_reason(message: str) -> str:
    """The first sentence of an XLA or JAX error, without status codes and HLO text."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
    line = re.sub(r"^([A-Z_]+: |during context \[[^]]*\]: )+", "", line)
    line = re.split(r": %|, metadata=", line)[0]
    return line if len(line) <= 100 else line[:99] + "…"


def _child(command: Sequence[str], timeout: float) -> tuple[list[dict], str | None]:
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        return _events(error.stdout), f"{NO_ANSWER} {timeout:g} s"
    if done.returncode == 0:
        return _events(done.stdout), None
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
    status = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    return _events(done.stdout), f"the process ended: {status} {short_reason(last[0])}".strip()


def _events(output: bytes | None) -> list[dict]:
    lines = (output or b"").decode(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _unsupported(reason: str) -> dict:
    return {"runs": False, "reason": short_reason(reason)}


def _with_verdict(dot: dict, dots: dict) -> dict:
    """The dot with its speed relative to float32 and the verdict."""
    seconds = dot.get("seconds")
    reference = dots.get("float32", {}).get("seconds")
    if not dot["runs"]:
        return {**dot, "verdict": "unsupported"}
    if dot is dots.get("float32"):
        return {**dot, "speed": 1.0, "verdict": "reference"}
    if not (seconds and reference):
        return {**dot, "speed": None, "verdict": "runs"}
    speed = reference / seconds
    return {**dot, "speed": round(speed, 2), "verdict": "native" if speed >= GAIN else "emulated or slower"}


def _emit(**event) -> None:
    print(json.dumps(event), flush=True)


def _compiled(name: str):
    import jax
    import jax.numpy as jnp
    import numpy as np

    dtype = jnp.dtype(name)
    wide = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    rows, inner, columns = SHAPE
    rng = np.random.default_rng(0)
    exact_lhs = rng.integers(0, 3, (rows, inner)).astype(np.float32)
    exact_rhs = rng.integers(0, 3, (inner, columns)).astype(np.float32)
    lhs, rhs = jnp.asarray(exact_lhs.astype(dtype)), jnp.asarray(exact_rhs.astype(dtype))
    dot = jax.jit(lambda lhs, rhs: jax.lax.dot(lhs, rhs, preferred_element_type=wide))
    if not np.array_equal(np.asarray(dot(lhs, rhs)).astype(np.float32), exact_lhs @ exact_rhs):
        raise ArithmeticError("gives wrong results")
    return lambda: dot(lhs, rhs).block_until_ready()


def _main(skip: Sequence[str]) -> None:
    import jax

    from octavo import kernels

    _emit(platform=jax.default_backend(), devices=[device.device_kind for device in jax.devices()])
    _emit(kernels={"ready": kernels.available(), "status": kernels.status()})
    dots = {}
    for name in (name for name in DTYPES if name not in skip):
        _emit(trying=name)
        try:
            dots[name] = _compiled(name)
        except Exception as error:  # Any error of the backend is reported as the result.
            _emit(dots={name: _unsupported(str(error))})
    _emit(trying=None)
    best = dict.fromkeys(dots, float("inf"))
    for _ in range(ROUNDS):  # Interleaved, so that load on the machine affects all types alike.
        for name, dot in dots.items():
            start = time.perf_counter()
            dot()
            best[name] = min(best[name], time.perf_counter() - start)
    _emit(dots={name: {"runs": True, "seconds": seconds} for name, seconds in best.items()})


if __name__ == "__main__":
    _main(sys.argv[1:])
