"""The folders of `deploy` as Kubernetes gets them, and their containers as processes of this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from servers import ROOT

DEPLOY = ROOT / "deploy"
ENGINES = ("vllm", "sglang")

Manifest = dict[str, Any]


def kustomized(folder: Path) -> list[Manifest]:
    """Build a folder with kubectl or kustomize. Skip the test if neither is here."""
    for name, verb in (("kubectl", "kustomize"), ("kustomize", "build")):
        if program := shutil.which(name):
            done = subprocess.run(
                [program, verb, folder], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
            return list(yaml.safe_load_all(done.stdout))
    pytest.skip("neither kubectl nor kustomize is here")


def pod(manifests: list[Manifest], name: str) -> Manifest:
    """Return the pod of the Deployment with this name."""
    found: Manifest
    (found,) = (
        one["spec"]["template"]["spec"]
        for one in manifests
        if (one["kind"], one["metadata"]["name"]) == ("Deployment", name)
    )
    return found


def container(spec: Manifest, name: str) -> Manifest:
    """Return a container, or an init container, of a pod."""
    found: Manifest
    (found,) = (
        one for one in [*spec.get("initContainers", []), *spec["containers"]] if one["name"] == name
    )
    return found


class Host:
    """A directory of this machine in the place of a container's file system.

    Volumes are folders in it. `replaced` has further texts that are others here, such as addresses. They
    are replaced in commands and in the files of ConfigMaps.
    """

    def __init__(self, directory: Path, replaced: Mapping[str, str]) -> None:
        self.directory = directory
        self.replaced = dict(replaced)

    def mount(self, spec: Manifest, name: str, contents: Mapping[str, Mapping[str, str]]) -> None:
        """Make the volumes of a container. `contents` has the files of each by the volume's name."""
        volumes = {one["name"]: one for one in spec["volumes"]}
        mounts = {one["name"]: one["mountPath"] for one in container(spec, name)["volumeMounts"]}
        self.replaced |= {path: f"{self.directory}{path}" for path in mounts.values()}
        for volume, path in mounts.items():
            place = Path(self.replaced[path])
            place.mkdir(parents=True, exist_ok=True)
            files = contents.get(volume, {})
            items = volumes[volume].get("secret", {}).get("items")
            for file in [item["key"] for item in items] if items else files:
                (place / file).write_text(self.here(files[file]), encoding="utf-8")

    def here(self, text: str) -> str:
        """Return a text with the places of this machine."""
        olds = sorted(self.replaced, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, olds)), lambda found: self.replaced[found[0]], text)

    def command(self, spec: Manifest, name: str) -> list[str]:
        """Return the command of a container."""
        found = container(spec, name)
        return [self.here(word) for word in [*found["command"], *found.get("args", [])]]
