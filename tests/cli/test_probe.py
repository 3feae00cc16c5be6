import sys

import pytest

from octavo.cli.probe import probe, short_reason

REFUSAL = """INVALID_ARGUMENT: during context [hlo verifier]: The backend does not support it: %convert = s32[2,2] \
convert(%a), metadata={op_name="jit"}

Failed after operand_upcaster"""


def child(script: str) -> list[str]:
    """A stand-in for the child process: `say` writes one event, `skip` holds the types to leave out."""
    prelude = "import json, os, sys, time\nskip = sys.argv[1:]\ndef say(**e): print(json.dumps(e), flush=True)\n"
    return [sys.executable, "-c", prelude + script]


def test_short_reason_keeps_the_sentence():
    assert short_reason(REFUSAL) == "The backend does not support it"
    assert len(short_reason("x" * 500)) == 100
    assert short_reason("") == "no reason given"


def test_speeds_are_relative_to_float32():
    found = probe(
        child("""
say(platform="cpu", devices=["cpu"])
say(dots={n: {"runs": True, "seconds": s} for n, s in {"float32": 4.0, "int8": 1.0, "float16": 3.9}.items()})
""")
    )
    assert found["error"] is None
    assert found["devices"] == ["cpu"]
    assert found["dots"]["float32"]["verdict"] == "reference"
    assert (found["dots"]["int8"]["speed"], found["dots"]["int8"]["verdict"]) == (4.0, "native")
    assert found["dots"]["float16"]["verdict"] == "emulated or slower"


def test_a_type_that_kills_the_process_is_unsupported_and_the_others_are_tried():
    found = probe(
        child("""
say(platform="cpu", devices=["cpu"])
for name in ("float32", "int4", "int8"):
    if name in skip: continue
    say(trying=name)
    if name == "int4":
        print("LLVM ERROR: Cannot select", file=sys.stderr)
        os.abort()
say(trying=None)
say(dots={n: {"runs": True, "seconds": 1.0} for n in ("float32", "int8")})
""")
    )
    assert found["error"] is None
    assert found["dots"]["int8"]["runs"]
    assert found["dots"]["int4"]["verdict"] == "unsupported"
    assert "killed by signal 6" in found["dots"]["int4"]["reason"]


def test_a_type_that_hangs_is_unsupported():
    found = probe(
        child("""
if "int4" not in skip:
    say(trying="int4")
    time.sleep(60)
say(dots={"float32": {"runs": True, "seconds": 1.0}})
"""),
        timeout=1.0,
    )
    assert found["dots"]["int4"]["reason"] == "no answer in 1 s"
    assert found["dots"]["float32"]["runs"]


@pytest.mark.parametrize(
    "script", ["import no_such_module", "say(platform='cpu', devices=[])\nsay(trying=None)\nsys.exit(3)"]
)
def test_a_child_that_dies_outside_a_type_is_an_error(script):
    found = probe(child(script))
    assert found["error"].startswith("the process ended: exit status")
    assert found["dots"] == {}
