"""List the objects in a store, for LMCache's `GET /cache/objects`.

A listing is sorted by key space and page hash. A cursor names the last object of a page of the listing,
so a cursor stays valid while objects come and go, and after a restart. Each page of a listing scans the
key spaces again, because a store lists pages in no particular order.
"""

from __future__ import annotations

import heapq
import re
from typing import TYPE_CHECKING

from hicache_storage.integrations.lmcache._engine import ListedObject

if TYPE_CHECKING:
    from hicache_storage.integrations.lmcache._engine import KeyFields
    from hicache_storage.integrations.lmcache._identity import Identity
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import PageStore

_CURSOR = re.compile(r"(?P<space_id>[0-9a-f]+)\.(?P<page_hash>[0-9a-f]+)")


def list_objects(
    store: PageStore,
    identity: Identity,
    serde: str,
    *,
    model_name: str | None,
    page_size: int,
    cursor: str | None,
) -> tuple[list[ListedObject], str | None]:
    """Return up to `page_size` objects after `cursor`, and the cursor of the next page, if any.

    A key that is stored in several layouts is listed once for each layout.

    Raises:
        ValueError: `page_size` is not positive, or `cursor` does not come from a listing.
        StorageError: The store cannot list its pages.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be positive, not {page_size}")
    first_id, last_hash = _place_of(cursor)
    found: list[tuple[str, ListedObject]] = []
    for space, key in _own_spaces(store, identity, serde, model_name):
        if space.id < first_id:
            continue
        after = last_hash if space.id == first_id else ""
        hashes = heapq.nsmallest(
            page_size + 1 - len(found),
            (info.page_hash for info in store.storage.scan(space) if info.page_hash > after),
        )
        found += [(space.id, ListedObject(key, name, space.page_nbytes)) for name in hashes]
        if len(found) > page_size:
            space_id, last = found[page_size - 1]
            return [listed for _, listed in found[:page_size]], f"{space_id}.{last.page_hash}"
    return [listed for _, listed in found], None


def _own_spaces(
    store: PageStore, identity: Identity, serde: str, model_name: str | None
) -> list[tuple[KeySpace, KeyFields]]:
    """Return the key spaces whose objects this adapter can load, sorted by id."""
    found: list[tuple[KeySpace, KeyFields]] = []
    for space in store.storage.spaces():
        key = identity.key_fields(space, serde)
        if (
            key is not None
            and space.frame_nbytes == store.frame_nbytes
            and model_name in (None, key.model_name)
        ):
            found.append((space, key))
    return sorted(found, key=lambda pair: pair[0].id)


def _place_of(cursor: str | None) -> tuple[str, str]:
    """Return the key-space id and the page hash that a cursor names.

    Raises:
        ValueError: The cursor does not come from a listing.
    """
    if cursor is None:
        return "", ""
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise ValueError(
            f"{cursor!r} is not a cursor of a listing: pass the token of the page before"
        )
    return match["space_id"], match["page_hash"]
