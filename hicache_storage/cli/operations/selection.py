"""The key spaces of a store that a verb works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_storage.keys import KeySpace, Shard

SHORT_ID_DIGITS = 8
_LEAST_ID_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSelection:
    """Key spaces by id, and by fields. Empty: all. A value of None selects any value."""

    ids: Sequence[str] = ()
    """Beginnings of ids. Each must select one key space."""
    model: str | None = None
    revision: str | None = None
    tenant: str | None = None
    pool: str | None = None

    def of(self, spaces: Iterable[KeySpace]) -> list[KeySpace]:
        """Return the selected key spaces, ordered by model and pool.

        Raises:
            ConfigError: An id is that of no key space, or of several.
        """
        known = sorted(spaces, key=lambda one: (one.model, one.revision, one.pool, one.id))
        chosen = {find_space(known, text).id for text in self.ids} if self.ids else None
        return [
            space
            for space in known
            if (chosen is None or space.id in chosen)
            and all(
                wanted is None or getattr(space, name) == wanted
                for name, wanted in (
                    ("model", self.model),
                    ("revision", self.revision),
                    ("tenant", self.tenant),
                    ("pool", self.pool),
                )
            )
        ]


def find_space(spaces: Iterable[KeySpace], text: str) -> KeySpace:
    """Return the key space whose id begins with `text`.

    Raises:
        ConfigError: There is none, or more than one, or the text has too few digits.
    """
    if len(text) < _LEAST_ID_DIGITS:
        raise ConfigError(f"key space {text!r}: give at least {_LEAST_ID_DIGITS} digits of its id")
    found = [space for space in spaces if space.id.startswith(text.lower())]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"the store has no key space {text!r}: `hicache ls` lists their ids")
    ids = ", ".join(space.id[:12] for space in found[:4])
    raise ConfigError(f"{len(found)} key spaces begin with {text!r}: {ids}; give more digits")


def format_shard(shard: Shard) -> str:
    """Return the layers, heads and context of a shard, such as `L0-32 H0-8`."""
    parts = [f"L{shard.layers[0]}-{shard.layers[1]}"]
    if shard.heads is not None:
        parts.append(f"H{shard.heads[0]}-{shard.heads[1]}")
    if shard.context is not None:
        parts.append(f"C{shard.context[0]}/{shard.context[1]}")
    return " ".join(parts)
