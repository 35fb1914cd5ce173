"""`hicache copy`: copy the pages of one store to another."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_storage.cli.printing import print_json, write_line
from hicache_storage.cli.progress import meter
from hicache_storage.cli.selection_flags import add_selection_arguments, selection_of
from hicache_storage.cli.sizes import counted, format_nbytes, size
from hicache_storage.cli.stores import (
    EVICT,
    TO_TIER,
    add_evict_argument,
    add_store_arguments,
    add_target_arguments,
    add_tier_argument,
    open_before_change,
    open_listed_store,
    open_to_change,
    same_store,
    source_and_target,
)
from hicache_storage.composition.parts import striped_parts, undivided
from hicache_storage.errors import ConfigError, NoSuchStore

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from hicache_storage import config
    from hicache_storage.cli.operations.copying import Copied
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

SUMMARY = "Copy the pages of one store to another, or move those of stripes to their places."

_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_tier_argument(parser)
    add_target_arguments(parser)
    add_selection_arguments(parser)
    add = parser.add_argument
    add(
        "--bandwidth-limit",
        type=size,
        metavar="BYTES",
        help="copy at most this many bytes a second, such as 200MiB",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print how much would be copied, and change nothing",
    )
    add_evict_argument(parser)
    add("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print the figures. Return 0 if the target has every page of the source, otherwise 1."""
    choice, target_choice, is_same = source_and_target(arguments, "copy")
    from hicache_storage.cli.operations.copying import Copied, copy  # noqa: PLC0415 - wrong flags fail fast
    from hicache_storage.cli.operations.free_space import largest_shortage  # noqa: PLC0415
    from hicache_storage.cli.operations.rate_limit import RateLimit  # noqa: PLC0415
    from hicache_storage.cli.operations.rebalancing import rebalance  # noqa: PLC0415

    limit, result = RateLimit(arguments.bandwidth_limit), Copied()
    is_trial: bool = arguments.dry_run
    opened = _open_trial if is_trial else open_to_change
    work: Callable[..., Copied] = rebalance if is_same else copy
    if is_same:
        _require_stripes(choice, arguments.tier)
        if not is_trial:  # a stripe that was added may not exist yet
            open_to_change(choice, arguments.tier, flag=TO_TIER).close()
    with open_listed_store(choice, "copy", arguments.tier) as source:
        selected = selection_of(arguments).of(source)
        result.unreadable = selected.unreadable
        if not is_trial and not arguments.evict:
            _require_free(work, source, selected.spaces, target_choice, arguments.to_tier)
        with opened(target_choice, arguments.to_tier, flag=TO_TIER) as target:
            is_done = False
            lacking = None
            try:
                with meter("looking" if is_trial else "copying") as shown:
                    work(
                        source,
                        target,
                        selected.spaces,
                        shown,
                        limit,
                        result=result,
                        is_trial=is_trial,
                    )
                is_done = True
                if is_trial:
                    short = largest_shortage(
                        target_choice, target, result.needed, arguments.to_tier
                    )
                    lacking = short.needed_nbytes - short.free_nbytes if short else 0
            finally:
                names = {"from": choice.backend, "to": target_choice.backend, "is_done": is_done}
                trial = {"is_dry_run": is_trial, "lacking_nbytes": lacking} if is_trial else {}
                if arguments.json:
                    print_json({**names, **trial, **result.as_json()})
                else:
                    _print(result, is_trial=is_trial, lacking_nbytes=lacking)
    is_known = is_trial or result.lost is not None
    return 0 if result.is_whole and is_known and not lacking else _FOUND


def _open_trial(choice: config.StorageChoice, tier: str | None, *, flag: str) -> HiCacheStorage:
    """Open the target read-only. If there is none, open an empty store in its place."""
    from hicache_storage.registry import open_storage  # noqa: PLC0415

    try:
        return open_before_change(choice, tier, flag=flag)
    except NoSuchStore:
        if tier is not None:
            raise
        capacity = choice.config.get("capacity_nbytes")
        return open_storage(
            "memory", {"capacity_nbytes": capacity} if capacity else {}, read_only=True
        )


def _require_stripes(choice: config.StorageChoice, tier: str | None) -> None:
    """Refuse to copy a store onto itself, unless it has stripes.

    Raises:
        ConfigError: It has none, so all its pages are in their places.
    """
    with suppress(NoSuchStore), open_listed_store(choice, "copy", tier) as look:
        if striped_parts(look):
            return
    raise same_store("copy")


def _require_free(
    work: Callable[..., Copied],
    source: HiCacheStorage,
    spaces: Sequence[KeySpace],
    choice: config.StorageChoice,
    tier: str | None,
) -> None:
    """Refuse a copy that the target has no free space for, as `--dry-run` counts it.

    Raises:
        ConfigError: The target would refuse or evict pages.
    """
    from hicache_storage.cli.operations.copying import Copied  # noqa: PLC0415
    from hicache_storage.cli.operations.free_space import largest_shortage  # noqa: PLC0415
    from hicache_storage.cli.operations.rate_limit import RateLimit  # noqa: PLC0415

    with suppress(NoSuchStore), _open_trial(choice, tier, flag=TO_TIER) as target:
        listed = sum(info.nbytes for space in spaces for info in source.scan(space))
        at_most = dict.fromkeys(undivided(target), 2 * listed)  # frames may be larger there
        if largest_shortage(choice, target, at_most, tier) is None:
            return
        with meter("looking") as shown:
            needed = work(
                source, target, spaces, shown, RateLimit(None), result=Copied(), is_trial=True
            ).needed
        short = largest_shortage(choice, target, needed, tier)
        if short is not None:
            where = f" in {short.names}" if short.names else ""
            is_tiered = set(target.page_shares().values()) == {1.0}
            way_out = f"copy into one tier with {TO_TIER}, " if is_tiered else ""
            raise ConfigError(
                f"copy: the target has {format_nbytes(short.free_nbytes)} free{where}, but the copy"
                f" needs {format_nbytes(short.needed_nbytes)}: make room, {way_out}or accept with"
                f" {EVICT} that the target refuses pages, or throws out as many of its own"
            )


def _print(result: Copied, *, is_trial: bool, lacking_nbytes: int | None) -> None:
    """Print the figures, even of a copy that failed or was interrupted, because it can be continued."""
    for line in _lines(result, is_trial=is_trial):
        write_line(line)
    if lacking_nbytes:
        write_line(
            f"the target lacks {format_nbytes(lacking_nbytes)} for them: it would refuse or evict pages"
        )


def _lines(result: Copied, *, is_trial: bool) -> Iterator[str]:
    from hicache_storage.cli.space_table import unreadable_lines  # noqa: PLC0415

    speed = format_nbytes(result.nbytes / max(result.elapsed_s, 1e-9))
    copied, nbytes = counted(result.copied, "page"), format_nbytes(result.nbytes)
    done = (
        f"{copied} would be copied, {nbytes}"
        if is_trial
        else f"{copied} copied, {nbytes} in {result.elapsed_s:.1f} s ({speed}/s)"
    )
    yield f"{done}; {result.skipped:,} already there"
    if result.removed:
        yield f"removed from stripes where they do not belong: {counted(result.removed, 'page')}"
    if result.left:
        yield f"could not be removed from there: {counted(result.left, 'page')}"
    for proof, count in result.not_proved.items():
        yield f"not copied: {counted(count, 'page')} ({proof.value.replace('_', ' ')})"
    if result.refused:
        yield f"refused by the target, which may be full: {counted(result.refused, 'page')}"
    if result.lost:
        yield (
            f"{counted(result.lost, 'page')} of these are not there any more: the target has evicted"
            " them, so it is too small. Give it room for all, or copy fewer key spaces"
        )
    if result.lost is None and not is_trial and result.confirmed:
        yield "the target was not asked whether it still has them: run the copy again"
    if result.is_given_up:
        yield "the copy stopped there, because the target took none of the last pages"
    yield from unreadable_lines(result.unreadable)
    for space in result.unframed_spaces:
        yield (
            f"key space {space.id} was not copied, because its pages have no frames to check them"
            " by"
        )
