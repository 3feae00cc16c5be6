"""requirements.lock names one version and its hashes for everything, and nothing but that."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

PIN = re.compile(
    r"^([a-z0-9][a-z0-9-]*)==[^ ;]+(?: ; [^\\]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE
)


def normal(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name
    return re.sub(r"[-_.]+", "-", name[0]).lower()


PINNED = {match[1] for match in PIN.finditer(LOCK)}


def declared():
    yield from PROJECT["project"]["dependencies"]
    for extra, requirements in PROJECT["project"]["optional-dependencies"].items():
        # The compilers of accelerators are a gigabyte, which only `octavo compile` needs.
        if extra not in ("tpu", "cuda"):
            yield from requirements
    for requirements in PROJECT["dependency-groups"].values():
        yield from (requirement for requirement in requirements if isinstance(requirement, str))


def test_every_line_is_a_comment_or_part_of_a_hashed_pin():
    rest = re.sub(r"^#.*\n", "", PIN.sub("", LOCK), flags=re.MULTILINE)
    assert rest.strip() == ""


@pytest.mark.parametrize("requirement", sorted(set(declared())))
def test_every_declared_dependency_is_pinned(requirement):
    assert normal(requirement) in PINNED, "run `make lock`"


@pytest.mark.parametrize("unwanted", ["torch", "tensorflow", "jupyter", "ipython"])
def test_the_install_stays_lean(unwanted):
    assert unwanted not in PINNED


def test_no_addresses_or_local_paths():
    assert not re.search(r"://|--index|--find-links|file:|\s/", LOCK)
