"""Builds the compiled data plane into wheels, if there is a C compiler, and writes the page of PyPI.

`HICACHE_NATIVE=0` leaves it out, and `HICACHE_NATIVE=1` fails where it cannot be built. If `CC` compiles
for another machine, `HICACHE_PLATFORM` has the platform of the wheel, as `build_wheels.py` sets both.
"""

from __future__ import annotations

import os
import re
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    """Compiles `hicache_storage/native`. A wheel without it is pure, and works on the reference."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        wanted = os.environ.get("HICACHE_NATIVE", "")
        build = runpy.run_path(str(Path(self.root) / "hicache_storage" / "native" / "_build.py"))
        reason = "HICACHE_NATIVE is 0" if wanted == "0" else build["build"]()
        if reason and wanted == "1":
            self.app.abort(f"HICACHE_NATIVE is 1, but there is no compiled data plane: {reason}")
        if reason:
            self.app.display_warning(
                f"hicache-storage runs without its compiled data plane: {reason}"
            )
            return
        here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        platform = os.environ.get("HICACHE_PLATFORM") or here
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(f"/hicache_storage/native/{build['MODULE']}")


class PageHook(MetadataHookInterface):
    """Makes the README the page of PyPI, where a relative link leads nowhere.

    `HICACHE_REPOSITORY` is the URL of the project on GitHub. Without it the links stay as they are.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        page = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("HICACHE_REPOSITORY", "").rstrip("/")
        if repository:
            files, images = (
                f"{repository}/{kind}/v{metadata['version']}" for kind in ("blob", "raw")
            )
            page = page.replace("git clone URL", f"git clone {repository}")
            page = re.sub(r"\]\((?!https?:|#)", f"]({files}/", page)
            page = re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{images}/', page)
            metadata["urls"] = {"Source": repository, "Changelog": f"{files}/CHANGELOG.md"}
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
