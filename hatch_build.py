"""Compiles the CPU kernels when Octavo is installed or a wheel of it is made; without a compiler it goes on."""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src/octavo/kernels")


class KernelsHook(BuildHookInterface):
    """The library lies beside the sources: an editable install finds it there, a wheel takes it along."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        spec = importlib.util.spec_from_file_location("compiling", Path(self.root) / KERNELS / "compiling.py")
        assert spec is not None
        assert spec.loader is not None
        compiling = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiling)
        library = compiling.build_if_needed(self.app.display_warning)
        if library is not None and version != "editable":
            build_data["pure_python"] = False
            # Any Python of this platform: the library knows XLA's interface, not Python's.
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["force_include"][str(library)] = f"octavo/kernels/{library.name}"
