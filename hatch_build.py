"""Builds the compiled data plane into wheels, where there is a C compiler."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    """Compiles `hicache_storage/native`. A wheel without it is pure, and works on the reference."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        folder = Path(self.root) / "hicache_storage" / "native"
        spec = importlib.util.spec_from_file_location("hicache_native_build", folder / "_build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        reason = module.build()
        if reason:
            self.app.display_warning(f"hicache-storage: no compiled data plane: {reason}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(f"/hicache_storage/native/{module.MODULE}")
