"""`tests/get_servers.sh` fetches the servers on every Debian, whatever it has installed or prefers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from servers import ROOT

PROGRAMS = {
    "redis-tools": "redis-check-rdb",
    "valkey-tools": "valkey-check-rdb",
    "prometheus": "promtool",
}
PACKAGES = (
    *PROGRAMS,
    *("libjemalloc2", "liblzf1", "libatomic1", "liblua5.1-0", "lua-cjson", "lua-bitop"),
    *("libibverbs1", "libnl-3-200", "libnl-route-3-200", "libnuma1", "libcurl4"),
)
NEWER = "2:2-1+deb12u9"
"""A version of the security updates, which is in none of the lists that the script has."""
MACHINES = {
    "plain": "",
    "security updates": 'Dir::State::status "{folder}/status";',
    "pins": 'Dir::Etc::preferences "{folder}/preferences";',
    "a default release": 'APT::Default-Release "bookworm-security";',
}

pytestmark = pytest.mark.skipif(
    not (shutil.which("apt-get") and shutil.which("dpkg-deb")),
    reason="no apt-get and dpkg-deb here",
)


def _package(folder: Path, name: str, architecture: str) -> str:
    """Build a package with one file, and return its paragraph in a list of packages."""
    root = folder / name
    program = root / "usr/bin" / PROGRAMS.get(name, name)
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    control = (
        f"Package: {name}\nVersion: 1-1\nArchitecture: {architecture}\n"
        "Maintainer: a <a@example.org>\nDescription: a test\n"
    )
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN/control").write_text(control)
    file = folder / "mirror" / f"{name}.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(root), str(file)]
    subprocess.run(command, check=True, capture_output=True)
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return f"{control}Filename: {file.name}\nSize: {len(data)}\nSHA256: {digest}\n"


def _mirror(folder: Path) -> str:
    """Write a mirror of Debian with the packages of the script, and return its URL."""
    command = ["dpkg", "--print-architecture"]
    architecture = subprocess.check_output(command, text=True).strip()
    (folder / "mirror").mkdir()
    listed = {name: _package(folder, name, architecture) for name in PACKAGES}
    backport = {"valkey-tools"}
    for suite, names in {
        "bookworm": listed.keys() - backport,
        "bookworm-backports": backport,
    }.items():
        place = folder / "mirror/dists" / suite
        path = f"main/binary-{architecture}/Packages"
        (place / path).parent.mkdir(parents=True)
        text = "\n".join(listed[name] for name in sorted(names))
        (place / path).write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (place / "Release").write_text(
            f"Suite: {suite}\nCodename: {suite}\nArchitectures: {architecture}\nComponents: main\n"
            f"SHA256:\n {digest} {len(text)} {path}\n"
        )
    (folder / "preferences").write_text("Package: *\nPin: release n=bookworm*\nPin-Priority: -1\n")
    (folder / "status").write_text(
        "\n".join(
            f"Package: {name}\nStatus: install ok installed\nVersion: {NEWER}\n"
            f"Architecture: {architecture}\nMaintainer: a <a@example.org>\nDescription: a\n"
            for name in PACKAGES
        )
    )
    return f"file://{folder}/mirror"


@pytest.mark.parametrize("machine", MACHINES)
def test_the_servers_are_fetched(machine: str, tmp_path: Path) -> None:
    clone = tmp_path / "clone/tests"
    clone.mkdir(parents=True)
    shutil.copy(ROOT / "tests/get_servers.sh", clone)
    config = tmp_path / "apt.conf"
    config.write_text(  # the mirror is not signed
        'Acquire::AllowInsecureRepositories "true";\nAPT::Get::AllowUnauthenticated "true";\n'
        + MACHINES[machine].format(folder=tmp_path)
    )
    done = subprocess.run(
        [clone / "get_servers.sh"],
        env={**os.environ, "APT_CONFIG": str(config), "DEBIAN_MIRROR": _mirror(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    fetched = {path.name for path in (clone.parent / ".servers/usr/bin").iterdir()}
    assert {"redis-server", "valkey-server", "promtool"} <= fetched
