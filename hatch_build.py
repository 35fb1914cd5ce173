"""Builds the compiled data plane into wheels, where there is a C compiler.

`HICACHE_NATIVE=0` leaves it out, and `HICACHE_NATIVE=1` fails where it cannot be built.
"""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    """Compiles `hicache_storage/native`. A wheel without it is pure, and works on the reference."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        wanted = os.environ.get("HICACHE_NATIVE", "")
        build = runpy.run_path(str(Path(self.root) / "hicache_storage" / "native" / "_build.py"))
        reason = "HICACHE_NATIVE is 0" if wanted == "0" else build["build"]()
        if reason and wanted == "1":
            self.app.abort(f"HICACHE_NATIVE is 1, and there is no compiled data plane: {reason}")
        if reason:
            self.app.display_warning(
                f"hicache-storage runs without its compiled data plane: {reason}"
            )
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(f"/hicache_storage/native/{build['MODULE']}")
