"""The folders of `deploy` as Kubernetes gets them, and their containers as processes of this machine."""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from servers import ROOT, RedisServer, program

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


def config_maps(manifests: list[Manifest], spec: Manifest) -> dict[str, Mapping[str, str]]:
    """Return the files of a pod's ConfigMaps by the name of the volume."""
    data = {one["metadata"]["name"]: one["data"] for one in manifests if "data" in one}
    volumes = (one for one in spec["volumes"] if "configMap" in one)
    return {one["name"]: data[one["configMap"]["name"]] for one in volumes}


def new_secret() -> dict[str, str]:
    """Return the files of a Secret `hicache-redis`."""
    password = secrets.token_hex(16)
    users = (DEPLOY / "redis/users.acl").read_text(encoding="utf-8")
    digest = hashlib.sha256(password.encode()).hexdigest()
    return {"password": password, "users.acl": users.replace("PASSWORD_SHA256", digest)}


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


class DeployedRedis(RedisServer):
    """The Redis of an engine's folder, by the container's command, its config and its users."""

    def __init__(self, directory: Path, engine: str, secret: Mapping[str, str]) -> None:
        super().__init__(directory)
        self.manifests = kustomized(DEPLOY / engine)
        self.secret = secret

    def command(self) -> list[str]:
        spec = pod(self.manifests, "hicache-redis")
        host = Host(self.directory, {"6379": str(self.port)})
        host.mount(spec, "redis", {**config_maps(self.manifests, spec), "users": self.secret})
        name, *arguments = host.command(spec, "redis")
        return [program(name), *arguments, "--bind", self.address]


class EngineHost(Host):
    """A host with the volumes of an engine's containers, which has this server for its Redis."""

    def __init__(
        self, directory: Path, engine: str, redis: RedisServer, secret: Mapping[str, str]
    ) -> None:
        super().__init__(directory, {"hicache-redis:6379": f"{redis.address}:{redis.port}"})
        manifests = kustomized(DEPLOY / engine)
        self.spec = pod(manifests, f"hicache-{engine}")
        self._contents = {**config_maps(manifests, self.spec), "password": secret}

    def run(self, name: str) -> list[str]:
        """Make the volumes of a container, and return its command."""
        self.mount(self.spec, name, self._contents)
        return self.command(self.spec, name)
