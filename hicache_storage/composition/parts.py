"""Find the parts of a storage by name. `nvme/a` is part `a` of part `nvme`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.storage import HiCacheStorage


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
