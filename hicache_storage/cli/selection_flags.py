"""Flags that select key spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from hicache_storage.cli.operations.selection import SpaceSelection


def add_selection_arguments(
    parser: argparse.ArgumentParser, *, default: str = "default: all"
) -> None:
    """Add flags that select key spaces by id, model, revision, tenant and pool."""
    add = parser.add_argument_group(f"key spaces ({default})").add_argument
    add(
        "--space",
        action="append",
        metavar="ID",
        help="the first digits of an id; may be given several times",
    )
    add("--model", metavar="NAME", help="of this model")
    add("--revision", metavar="NAME", help='of this revision of the weights; "" for none')
    add("--tenant", metavar="NAME", help='of this tenant; "" for none')
    add("--pool", metavar="NAME", help="of this pool, such as kv or draft")


def selection_of(arguments: argparse.Namespace) -> SpaceSelection:
    """Return the selection that the flags describe."""
    from hicache_storage.cli.operations.selection import SpaceSelection  # noqa: PLC0415

    return SpaceSelection(
        ids=arguments.space or (),
        model=arguments.model,
        revision=arguments.revision,
        tenant=arguments.tenant,
        pool=arguments.pool,
    )
