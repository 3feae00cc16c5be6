import pytest

from octavo.cli import machine
from octavo.cli.machine import accelerators, parse_cpuinfo, parse_sysctl

X86 = """\
processor	: 0
model name	: Some CPU @ 2.00GHz
flags		: fpu avx2 fma avx512f avx512_vnni

processor	: 1
model name	: Some CPU @ 2.00GHz
flags		: fpu avx2 fma avx512f avx512_vnni
"""
ARM = """\
processor	: 0
Features	: fp asimd asimddp i8mm bf16
CPU implementer	: 0x41
"""
INTEL_MAC = """\
machdep.cpu.brand_string: Intel(R) Core(TM) i9
machdep.cpu.features: FPU SSE4.2 FMA
machdep.cpu.leaf7_features: AVX2 AVX512F AVX512VNNI
"""
APPLE = """\
machdep.cpu.brand_string: Apple M2
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_SME: 0
"""


def test_x86_linux():
    model, flags = parse_cpuinfo(X86)
    assert model == "Some CPU @ 2.00GHz"
    assert {"avx2", "avx512_vnni"} <= flags


def test_arm_linux_names_no_model():
    assert parse_cpuinfo(ARM) == ("unknown", {"fp", "asimd", "asimddp", "i8mm", "bf16"})


def test_intel_mac_flags_get_their_linux_names():
    assert parse_sysctl(INTEL_MAC) == ("Intel(R) Core(TM) i9", {"fma", "avx2", "avx512f", "avx512_vnni"})


def test_apple_silicon():
    assert parse_sysctl(APPLE) == ("Apple M2", {"asimddp", "i8mm"})


def test_no_sysctl_is_unknown():
    assert parse_sysctl("") == ("unknown", set())


def test_elsewhere_the_cpu_is_unknown(monkeypatch):
    monkeypatch.setattr(machine.platform, "system", lambda: "Plan9")
    cpu = machine.cpu()
    assert (cpu.model, cpu.has, cpu.lacks) == ("unknown", (), ())
    assert cpu.cores >= 1


def test_this_cpu_has_and_lacks_each_known_flag_once():
    cpu = machine.cpu()
    assert set(cpu.has).isdisjoint(cpu.lacks)


@pytest.mark.parametrize(
    ("vendor", "kind", "device", "found"),
    [
        ("0x10de", "0x030200", "0x2330", ["jax[cuda13]"]),
        ("0x10de", "0x040300", "0x10fa", []),  # the sound output of a graphics card
        ("0x1ae0", "0x088000", "0x0063", ["jax[tpu]"]),
        ("0x1ae0", "0x020000", "0x0042", []),  # a virtual network card
        ("0x8086", "0x030000", "0x0042", []),
    ],
)
def test_accelerators_on_the_bus(tmp_path, vendor, kind, device, found):
    card = tmp_path / "0000:00:04.0"
    card.mkdir()
    for name, text in (("vendor", vendor), ("class", kind), ("device", device)):
        (card / name).write_text(text + "\n")
    assert [a.requirement for a in accelerators(tmp_path, tmp_path / "none")] == found


def test_amd_gpu_by_its_driver(tmp_path):
    (tmp_path / "kfd").touch()
    assert [a.name for a in accelerators(tmp_path / "none", tmp_path / "kfd")] == ["AMD GPU"]
