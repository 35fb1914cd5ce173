"""Find the parts of a storage by name. `nvme/a` is part `a` of part `nvme`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from hicache_storage.errors import ConfigError, HiCacheError, shown
from hicache_storage.scalars import expand_home
from hicache_storage.storage import StorageStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, PageInfo

_AT_ONCE = 1024
_PLACE_FIELDS = (
    *("url", "prefix", "sentinels", "sentinel_master", "endpoint_url", "bucket"),
    *("master_server_address", "tenant_id", "backend", "config"),
)


def all_parts(storage: HiCacheStorage) -> dict[str, HiCacheStorage]:
    """Return the parts of a storage by name, each before its own parts. {} if it has none."""
    found: dict[str, HiCacheStorage] = {}
    for name, part in storage.parts().items():
        found[name] = part
        found |= {f"{name}/{below}": deeper for below, deeper in all_parts(part).items()}
    return found


def undivided(storage: HiCacheStorage) -> dict[str, HiCacheStorage]:
    """Return the stores that hold the pages: parts without parts, or a plain store itself as ""."""
    parts = all_parts(storage) or {"": storage}
    return {name: part for name, part in parts.items() if not part.parts()}


def striped_parts(storage: HiCacheStorage, name: str = "") -> dict[str, HiCacheStorage]:
    """Return the storages whose parts have a share of the pages each, inner ones first, by name.

    `storage` itself is called `name`.
    """
    found: dict[str, HiCacheStorage] = {}
    for own, part in storage.parts().items():
        found |= striped_parts(part, f"{name}/{own}".lstrip("/"))
    if any(share < 1 for share in storage.page_shares().values()):
        found[name] = storage
    return found


def misplaced(striped: HiCacheStorage, part: str, space: KeySpace) -> Iterator[PageInfo]:
    """Yield the pages in one part of `striped` that belong in another one, where reads look for them."""
    listed = striped.parts()[part].scan(space)
    while batch := [*islice(listed, _AT_ONCE)]:
        places = striped.page_parts(space, [info.page_hash for info in batch])
        yield from (info for info, names in zip(batch, places, strict=True) if part not in names)


def find_part(storage: HiCacheStorage, name: str, flag: str) -> HiCacheStorage:
    """Return the part called `name`. `flag` is where the name comes from, for messages.

    Raises:
        ConfigError: There is no such part. The message lists the names.
    """
    parts = all_parts(storage)
    if name in parts:
        return parts[name]
    if not parts:
        raise ConfigError(f"{flag} {shown(name)!r}: this store has no tiers or stripes")
    raise ConfigError(
        f"{flag}: there is no tier or stripe {shown(name)!r}: choose one of {', '.join(parts)}"
    )


def undivided_configs(
    backend: str, config: Mapping[str, Any]
) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return the backend and config of each store that holds pages, by the name of its part.

    A part in a config is an object with `name`, `backend` and `config`. A backend below another one, as
    that of `encrypted`, has no name of its own. A plain store is its own, as "".

    Examples:
        >>> tiers = [{"name": "ram", "backend": "memory"}, {"name": "far", "backend": "s3"}]
        >>> undivided_configs("tiered", {"tiers": tiers})
        {'ram': ('memory', {}), 'far': ('s3', {})}
    """
    return dict(_configs_in(backend, config, ""))


def _configs_in(
    backend: str, fields: Mapping[str, Any], name: str
) -> Iterator[tuple[str, tuple[str, Mapping[str, Any]]]]:
    lists: list[list[Any]] = [value for value in fields.values() if isinstance(value, list)]
    members: list[Mapping[str, Any]] = [
        item
        for value in lists
        for item in value
        if isinstance(item, Mapping) and {"name", "backend"} <= item.keys()
    ]
    for member in members:
        below = f"{name}/{member['name']}".lstrip("/")
        yield from _configs_in(member["backend"], member.get("config", {}), below)
    if "backend" in fields and isinstance(fields.get("config"), Mapping):
        yield from _configs_in(fields["backend"], fields["config"], name)
    elif not members:
        yield name, (backend, fields)


def place_of(config: Mapping[str, Any]) -> object:
    """Return the part of a config that names the place of the store, or the whole config.

    Examples:
        >>> place_of({"url": "redis://cache:6379", "timeout_s": 2})
        {'url': 'redis://cache:6379'}

    Raises:
        ConfigError: The path begins with `~`, and there is no home directory.
    """
    path = config.get("path")
    if isinstance(path, str):
        try:
            return os.path.realpath(expand_home(path))
        except ValueError as error:
            raise ConfigError(f"path: {error}") from None
    named = {name: config[name] for name in _PLACE_FIELDS if name in config}
    return {
        name: place_of(cast("Mapping[str, Any]", value))
        if isinstance(value, Mapping)
        else (value.rstrip("/") if isinstance(value, str) else value)
        for name, value in (named or config).items()
    }


def stats_of(storage: HiCacheStorage) -> StorageStats:
    """Return a storage's figures, or none if it fails, so that those of others can still be shown."""
    try:
        return storage.stats()
    except HiCacheError:
        return StorageStats()


def split_counter(counter: str, parts: Iterable[str]) -> tuple[str, str]:
    """Return the part that a counter is about, or "", and the counter's own name.

    Examples:
        >>> split_counter("nvme.a.evicted", ["nvme", "nvme/a"])
        ('nvme/a', 'evicted')
        >>> split_counter("evicted", ["nvme", "nvme/a"])
        ('', 'evicted')
    """
    owners = [part for part in parts if counter.startswith(part.replace("/", ".") + ".")]
    owner = max(owners, key=len, default="")
    return owner, counter[len(owner) + 1 :] if owner else counter
