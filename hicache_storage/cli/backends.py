"""`hicache backends`: list the backends, their capabilities and their missing dependencies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.cli.printing import output_console, print_json, print_lines
from hicache_storage.text_tables import text_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from hicache_storage.registry import Backend

SUMMARY = "List the storage backends: capabilities, and what is missing to use them."

# The capabilities by which users choose a backend. More do not fit into 80 columns.
_MAIN_CAPABILITIES = ("retention", "durability", "shared", "bounded")
_WIDE = 180


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add = parser.add_argument
    add("--capabilities", action="store_true", help="print everything that each backend declares")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print one entry for each backend. Return 0."""
    from hicache_storage.registry import backends  # noqa: PLC0415 - keeps `hicache --help` fast

    entries = [_entry(backend) for backend in backends().values()]
    if arguments.json:
        print_json(entries)
    else:
        _print_table(entries, everything=arguments.capabilities)
    return 0


def _entry(backend: Backend) -> dict[str, Any]:
    """Return the `--json` entry for one backend. `problem` is null if the backend is usable."""
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


def _print_table(entries: Sequence[dict[str, Any]], *, everything: bool) -> None:
    """Print a line for each backend, then the problems, and with `everything` all capabilities."""
    console = output_console()
    is_wide = console.width >= _WIDE
    names = (name for entry in entries for name in entry["capabilities"])
    shown = tuple(dict.fromkeys(names)) if is_wide else _MAIN_CAPABILITIES
    titles = ("name", "installed", *shown, *(["from"] if is_wide else []))
    rows: list[list[str]] = []
    for entry in entries:
        values = [str(entry["capabilities"].get(name, "")) for name in shown]
        installed = "yes" if entry["installed"] else "no"
        origin = [entry["distribution"]] if is_wide else []
        rows.append([entry["name"], installed, *values, *origin])
    table = text_table([title.replace("_", " ") for title in titles], rows)
    print_lines(console, [table, *_paragraphs(entries, everything=everything)])


def _paragraphs(entries: Sequence[dict[str, Any]], *, everything: bool) -> Iterator[str]:
    for entry in entries:
        if entry["problem"]:
            prefix = "" if entry["name"] in entry["problem"] else f"{entry['name']}: "
            yield f"{prefix}{entry['problem']}"
    from hicache_storage import native  # noqa: PLC0415 - only this verb tells

    plain = f"the Python reference: {native.reason}"
    yield f"The data plane is {'compiled' if native.implementation == 'compiled' else plain}."
    if not everything:
        yield (
            "The config of an open storage may reduce these. Use --capabilities to see all"
            " capabilities."
        )
        return
    for entry in entries:
        capabilities = [f"{name} {value}" for name, value in entry["capabilities"].items()]
        if capabilities:
            yield f"{entry['name']}: {', '.join(capabilities).replace('_', ' ')}"
