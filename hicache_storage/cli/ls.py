"""`hicache ls`: list the key spaces of a store, or the pages of one key space."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from hicache_storage.cli.printing import output_console, print_json, print_lines, write_line
from hicache_storage.cli.progress import meter
from hicache_storage.cli.sizes import counted, format_nbytes
from hicache_storage.cli.stores import (
    add_store_arguments,
    add_tier_argument,
    label_lines,
    open_listed_store,
    store_choice,
)
from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from hicache_storage.cli.operations.selection import SpaceUsage
    from hicache_storage.cli.operations.usage import Fill
    from hicache_storage.cli.progress import Meter
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, UnreadableSpace

SUMMARY = "List the key spaces of a store, or the pages of one."

_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_tier_argument(parser)
    add = parser.add_argument
    add(
        "space",
        nargs="?",
        metavar="SPACE",
        help="list the pages of this key space; give the first digits of its id",
    )
    add(
        "--no-count",
        action="store_true",
        help="do not count pages, because that reads the whole listing",
    )
    add("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the list. Return 1 if some key spaces cannot be read, otherwise 0."""
    choice = store_choice(arguments)
    from hicache_storage.cli.operations.selection import (  # noqa: PLC0415 - wrong flags fail fast
        SpaceSelection,
        find_space,
    )
    from hicache_storage.cli.operations.usage import fills_of  # noqa: PLC0415

    with open_listed_store(choice, "ls", arguments.tier) as storage:
        if arguments.space is not None:
            space = find_space(storage, arguments.space)
            _print_pages(storage, space, as_json=arguments.json)
            return 0
        selected = SpaceSelection().of(storage)
        usages = _usages(storage, selected.spaces, count=not arguments.no_count)
        fills, labels = fills_of(storage), label_lines(storage)
    if arguments.json:
        document = {
            "backend": choice.backend,
            "spaces": [one.as_json() for one in usages],
            "unreadable_spaces": [asdict(one) for one in selected.unreadable],
            "capacities": [one.as_json() for one in fills],
            "labels": labels,
        }
        print_json(document)
    else:
        _print_table(usages, selected.unreadable, fills, labels)
    return _FOUND if selected.unreadable else 0


def _usages(
    storage: HiCacheStorage, spaces: Sequence[KeySpace], *, count: bool
) -> list[SpaceUsage]:
    from hicache_storage.cli.operations.collection import Candidate, Wanted  # noqa: PLC0415
    from hicache_storage.cli.operations.selection import SpaceUsage  # noqa: PLC0415

    if not count:
        return [SpaceUsage(space, None, None) for space in spaces]
    with meter("counting") as shown:
        if parts := storage.parts():
            return [_usage(parts, space, shown) for space in spaces]
        found = Wanted().found(storage, spaces, shown)
        return [one.usage for one in found if isinstance(one, Candidate)]


def _usage(parts: Mapping[str, HiCacheStorage], space: KeySpace, shown: Meter) -> SpaceUsage:
    """Count the pages of all parts in one pass, so that the sums agree while engines write."""
    from hicache_storage.cli.operations.selection import SpaceUsage  # noqa: PLC0415

    sizes: dict[bytes, int] = {}
    tiers: dict[str, tuple[int, int]] = {}
    for name, part in parts.items():
        try:
            found = {bytes.fromhex(info.page_hash): info.nbytes for info in part.scan(space)}
        except (StorageUnavailable, StorageTimeout) as error:
            raise type(error)(f"{name}: {error}") from error
        shown.advance(len(found), 0)
        tiers[name] = len(found), sum(found.values())
        sizes |= found
    return SpaceUsage(space, len(sizes), sum(sizes.values()), tiers)


def _print_pages(storage: HiCacheStorage, space: KeySpace, *, as_json: bool) -> None:
    """Print a line for each page as the store lists it, or one JSON document."""

    pages = storage.scan(space)
    if as_json:
        found = [{"hash": info.page_hash, "nbytes": info.nbytes} for info in pages]
        print_json({"id": space.id, **space.manifest(), "page_list": found})
        return
    for info in pages:
        write_line(f"{info.page_hash} {info.nbytes}")


def _print_table(
    usages: Sequence[SpaceUsage],
    unreadable: Sequence[UnreadableSpace],
    fills: Sequence[Fill],
    labels: Sequence[str],
) -> None:
    from hicache_storage.cli.space_table import space_parts, unreadable_lines  # noqa: PLC0415

    pages = sum(one.pages or 0 for one in usages)
    nbytes = sum(one.nbytes or 0 for one in usages)
    is_known = all(one.pages is not None for one in usages)
    figures = f", {counted(pages, 'page')}, {format_nbytes(nbytes)}" if is_known else ""
    total = f"{counted(len(usages), 'key space')}{figures}"
    console = output_console()
    lines = [*unreadable_lines(unreadable), *map(_fill_line, fills), *labels, total]
    print_lines(console, [*space_parts(usages, console.width), *lines])


def _fill_line(fill: Fill) -> str:
    used, capacity = format_nbytes(fill.used_nbytes), format_nbytes(fill.capacity_nbytes)
    where = f"{fill.name}: " if fill.name else ""
    return f"{where}{used} of the capacity of {capacity} in use ({fill.share:.1%})"
