"""Build the sdist, and from it a wheel for each platform: `make wheel`.

Zig compiles them all on one Linux machine, because it has the headers of each C library, and the
versions of its symbols. auditwheel then checks that the module needs no more than the tag of the wheel
promises, and abi3audit that it keeps to the limited API of CPython.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
TARGETS = {
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "musllinux_1_2_x86_64": "x86_64-linux-musl",
    "musllinux_1_2_aarch64": "aarch64-linux-musl",
}
"""For each platform of a wheel, Zig's name of the target.

The headers of this machine's Python fit them all, because they are 64 bit, and little-endian.
"""


def main() -> None:
    for old in DIST.glob("hicache_storage-*"):
        old.unlink()
    run(ROOT, "hatchling", "build", "--target", "sdist", "--directory", DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        (sources,) = Path(scratch).iterdir()
        for platform, target in TARGETS.items():
            build(sources, platform, target)
    run(DIST, "twine", "check", "--strict", *DIST.glob("hicache_storage-*"))
    for path in sorted(DIST.glob("hicache_storage-*")):
        print(f"{path.stat().st_size:>9,}  {path.name}{contents(path)}")


def build(sources: Path, platform: str, target: str) -> None:
    """Build the wheel of one platform, and check it."""
    compiler = shlex.join([sys.executable, "-m", "ziglang", "cc", "-target", target, "-s"])
    command = ("hatchling", "build", "--target", "wheel", "--directory", DIST)
    run(sources, *command, CC=compiler, HICACHE_NATIVE="1", HICACHE_PLATFORM=platform)
    (wheel,) = DIST.glob(f"*-{platform}.whl")
    audit = ("auditwheel", "show", "--json", "--ldpaths", sources)  # no library of this machine
    shown = run(DIST, *audit, wheel)
    found = json.loads(shown[shown.index("{") :])
    # musl's loader takes each name that begins with `libc.` for itself. auditwheel knows only Alpine's.
    libraries = set(found["external_libs"]) - ({"libc.so"} if "musl" in target else set())
    if libraries or found["sym_tag"] != platform or found["unsupported_isa"]:
        sys.exit(f"{wheel.name} is not of its platform:\n{shown}")
    run(DIST, "abi3audit", "--strict", wheel)


def run(directory: Path, module: str, *arguments: Path | str, **variables: str) -> str:
    """Run a program of this environment. Return what it printed, or exit with it if it failed."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(  # noqa: S603 - programs of this environment
        command,
        cwd=directory,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout}")
    return done.stdout


def contents(path: Path) -> str:
    """Say how many files a wheel has, and how large its compiled module is."""
    if path.suffix != ".whl":
        return ""
    with zipfile.ZipFile(path) as wheel:
        files = wheel.infolist()
    (module,) = (one for one in files if one.filename.endswith(".so"))
    nbytes = sum(one.file_size for one in files)
    return f"  {len(files)} files, {nbytes:,} bytes, of them {module.file_size:,} compiled"


if __name__ == "__main__":
    main()
