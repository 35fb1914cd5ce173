"""`hicache-conformance new NAME`: write a package with a new backend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

SUMMARY = "Write a package hicache-NAME: a small conformant backend with its tests, as a start."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("name", metavar="NAME", help="the backend's name, such as acme or acme-kv")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where hicache-NAME is made (default: the current directory)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the package and print the commands that test it."""
    from hicache_conformance.scaffold import write_package  # noqa: PLC0415 - `--help` is quick

    directory = write_package(arguments.name, arguments.directory)
    name, config = arguments.name, '{"path": "{scratch}/pages"}'
    lines = (
        f"{directory}: written. Next:",
        f"  cd {directory} && pytest --hicache-quick",
        f"  pip install -e . && hicache-conformance --quick --hicache-storage-backend {name} \\",
        f"    --hicache-storage-backend-extra-config '{config}'",
    )
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
