"""Put the Python files of vLLM's wheel, but not its CUDA libraries, into a directory of modules.

    python tests/install_vllm.py 0.33.0 DIRECTORY

The wheel (336 MB) is fetched into a temporary directory, by the pip of this Python.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def install(version: str, target: Path) -> None:
    """Fetch the wheel of `version` and unpack its Python files and metadata into `target`."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        wanted = ["--no-deps", "--only-binary=:all:", "--dest", scratch, f"vllm=={version}"]
        subprocess.run([*pip, "download", *wanted], check=True)
        (path,) = Path(scratch).glob("vllm-*.whl")
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            kept = [name for name in names if name.endswith(".py") or ".dist-info/" in name]
            wheel.extractall(target, kept)


if __name__ == "__main__":
    install(sys.argv[1], Path(sys.argv[2]))
