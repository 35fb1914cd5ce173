"""`hicache backends`: what can be named, what it can do, and what is missing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from hicache_storage.registry import Backend

SUMMARY = "List the storage backends: capabilities, and what is missing to use them."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's flags."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print one entry a backend; always 0."""
    from hicache_storage.registry import backends  # noqa: PLC0415 - `hicache --help` is quick

    entries = [_entry(backend) for backend in backends().values()]
    if arguments.json:
        json.dump(entries, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _print_table(entries)
    return 0


def _entry(backend: Backend) -> dict[str, Any]:
    """What `--json` says of one backend; `problem` is null where it can be used."""
    from hicache_storage.storage import describe  # noqa: PLC0415

    entry: dict[str, Any] = {
        "name": backend.name,
        "installed": True,
        "problem": None,
        "capabilities": {},
        "distribution": backend.distribution,
        "target": backend.target,
    }
    try:
        entry["capabilities"] = describe(backend.load().capabilities)
    except Exception as error:  # noqa: BLE001 - a plug-in that breaks on import is a row, not a crash
        entry |= {"installed": False, "problem": str(error) or type(error).__name__}
    return entry


def _print_table(entries: list[dict[str, Any]]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(title="Storage backends", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("installed")
    table.add_column("capabilities, or what is missing", overflow="fold")
    table.add_column("from", overflow="fold")
    for entry in entries:
        words = [f"{name} {word}" for name, word in entry["capabilities"].items()]
        table.add_row(
            entry["name"],
            "yes" if entry["installed"] else "no",
            _plain(entry["problem"] or ", ".join(words).replace("_", " ")),
            _plain(f"{entry['distribution']}\n{entry['target']}"),
        )
    Console().print(table)


def _plain(text: str) -> str:
    """Text that rich takes literally: `hicache-storage[redis]` is no style."""
    from rich.markup import escape  # noqa: PLC0415

    return escape(text)
