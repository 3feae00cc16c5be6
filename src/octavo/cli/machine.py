"""The hardware of this machine: CPU and its vector extensions, accelerators on the bus, a C++ compiler."""

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

# The extensions that decide which low-precision dots are fast, per instruction set.
X86_FLAGS = (
    "avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16",
)  # fmt: skip
ARM_FLAGS = ("asimddp", "i8mm", "bf16", "sve", "sve2", "sme")
# macOS's names for the Arm extensions above.
_SYSCTL_ARM = {"feat_dotprod": "asimddp", "feat_i8mm": "i8mm", "feat_bf16": "bf16", "feat_sme": "sme"}

_GOOGLE, _NVIDIA = "0x1ae0", "0x10de"
# Google's PCI vendor id is on virtual network cards too; these device ids are TPUs (v2 to v7).
_TPU_DEVICES = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}


@dataclass(frozen=True)
class Cpu:
    """A CPU's name, its cores, and which of the extensions that matter it has and lacks."""

    model: str
    cores: int
    has: tuple[str, ...]
    lacks: tuple[str, ...]


@dataclass(frozen=True)
class Accelerator:
    """An accelerator on the bus, the platform name JAX gives it, and the requirement that makes JAX use it."""

    name: str
    platform: str
    requirement: str


def cpu() -> Cpu:
    """Describe this machine's CPU; what cannot be found out is 'unknown'."""
    model, flags = "unknown", None
    if platform.system() == "Linux" and (text := _read_text(Path("/proc/cpuinfo"))):
        model, flags = parse_cpuinfo(text)
    elif platform.system() == "Darwin":
        model, flags = parse_sysctl(_output("sysctl", "machdep.cpu", "hw.optional"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    known = ARM_FLAGS if platform.machine().lower() in ("arm64", "aarch64") else X86_FLAGS
    known = () if flags is None else known
    return Cpu(model, cores, *(tuple(f for f in known if (f in (flags or ())) == has) for has in (True, False)))


def parse_cpuinfo(text: str) -> tuple[str, set[str]]:
    """The model name and flags in the text of Linux's /proc/cpuinfo."""
    fields = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    return fields.get("model name") or "unknown", set((fields.get("flags") or fields.get("features") or "").split())


def parse_sysctl(text: str) -> tuple[str, set[str]]:
    """The model name and flags in the output of macOS's `sysctl machdep.cpu hw.optional`, under Linux's names."""
    fields = dict(re.findall(r"^([\w.]+): (.*)$", text, re.MULTILINE))
    words = (fields.get("machdep.cpu.features", "") + " " + fields.get("machdep.cpu.leaf7_features", "")).lower()
    # macOS writes AVX512VNNI where Linux writes avx512_vnni.
    joined = {word.replace("_", "") for word in words.split()}
    flags = {flag for flag in X86_FLAGS if flag.replace("_", "") in joined}
    arm = {_SYSCTL_ARM.get(key.rpartition(".")[2].lower()) for key, value in fields.items() if value == "1"}
    return fields.get("machdep.cpu.brand_string", "unknown"), flags | {flag for flag in arm if flag}


def accelerators(pci: Path = Path("/sys/bus/pci/devices"), kfd: Path = Path("/dev/kfd")) -> list[Accelerator]:
    """The accelerators that the operating system sees, whether or not JAX can use them."""
    found = {}
    for device in sorted(pci.glob("*")):
        vendor, kind, number = (_read_text(device / name).strip() for name in ("vendor", "class", "device"))
        if vendor == _NVIDIA and kind.startswith("0x03"):
            found["gpu"] = Accelerator("NVIDIA GPU", "gpu", "jax[cuda13]")
        if vendor == _GOOGLE and number in _TPU_DEVICES:
            found["tpu"] = Accelerator("TPU", "tpu", "jax[tpu]")
    if kfd.exists() and "gpu" not in found:
        found["gpu"] = Accelerator("AMD GPU", "gpu", "jax[rocm7-local]")
    return list(found.values())


def compiler() -> str | None:
    """The path of a C++ compiler, or None."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
