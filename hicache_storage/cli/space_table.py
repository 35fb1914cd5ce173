"""A table of key spaces in 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from hicache_storage.cli.operations.selection import SHORT_ID_DIGITS, format_shard
from hicache_storage.cli.sizes import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.cli.operations.listing import SpaceUsage
    from hicache_storage.keys import KeySpace


def space_table(usages: Iterable[SpaceUsage]) -> Table:
    """Return a table with a row for each key space. Long names take several lines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("space", no_wrap=True)
    table.add_column("model", overflow="fold", ratio=1)
    table.add_column("pool", overflow="fold", max_width=10)
    table.add_column("shard", max_width=9)
    table.add_column("format", overflow="fold", max_width=13)
    table.add_column("pages", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for usage in usages:
        space = usage.space
        table.add_row(
            space.id[:SHORT_ID_DIGITS],
            _model_text(space),
            space.pool,
            format_shard(space.shard),
            f"{space.dtype} {space.layout}",
            "" if usage.pages is None else f"{usage.pages:,}",
            "" if usage.nbytes is None else format_nbytes(usage.nbytes),
        )
    return table


def _model_text(space: KeySpace) -> str:
    parts = [space.model]
    if space.revision:
        parts.append(f"revision {space.revision}")
    if space.tenant:
        parts.append(f"tenant {space.tenant}")
    return "\n".join(parts)
