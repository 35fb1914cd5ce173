"""What a writer says when a request's pages are in storage: one small page of its own for each shard."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hicache_storage.controller.topic import id_bytes
from hicache_storage.keys import Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace

_SHOWN_CHARACTERS = 200


class Completion(BaseModel):
    """How far the pages of one request are in storage, in one shard of one pool.

    The key says whose it is: a completion is stored under `completion_hash`, and the page store proves
    that what it read belongs there. The fields are what the decode side checks, and what people read.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    request_id: str
    """For people: cut short where it is long."""
    pool: str
    shard: Shard
    space_id: str
    """Of the pages: the key space as the engine knows it, without a frame."""
    prompt_pages: int = Field(ge=0)
    """Pages that the request has."""
    pages: int = Field(ge=0)
    """The longest usable prefix among them that is in storage."""
    last_page_hash: str = ""
    """Of that prefix. Page hashes are chained: it names every page before it."""
    written_at_s: float
    """Unix time."""

    @classmethod
    def of(
        cls, request_id: str, space: KeySpace, hashes: Sequence[str], pages: int, now_s: float
    ) -> Completion:
        """The completion of `pages` leading pages of `hashes` in `space`."""
        return cls(
            request_id=_printable(request_id),
            pool=space.pool,
            shard=space.shard,
            space_id=space.id,
            prompt_pages=len(hashes),
            pages=pages,
            last_page_hash=hashes[pages - 1] if pages else "",
            written_at_s=now_s,
        )

    def encode(self, nbytes: int) -> bytes:
        """JSON and zeros: a page of `nbytes`.

        Raises:
            ValueError: It does not fit: the pool's name is too long.
        """
        text = self.model_dump_json().encode()
        if len(text) > nbytes:
            raise ValueError(
                f"a completion of {len(text)} bytes does not fit into {nbytes}: give the pool a shorter"
                f" name than {self.pool[:_SHOWN_CHARACTERS]!r}"
            )
        return text.ljust(nbytes, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Completion | None:
        """The completion that `data` holds; None where it is none that this version can read."""
        try:
            return cls.model_validate_json(data.rstrip(b"\0"))
        except ValidationError:
            return None

    def is_about(self, space: KeySpace, hashes: Sequence[str]) -> bool:
        """Whether it speaks of pages of `hashes` in `space`."""
        if self.space_id != space.id or self.pages > len(hashes):
            return False
        return self.last_page_hash == (hashes[self.pages - 1] if self.pages else "")


def completion_hash(request_id: str, space: KeySpace, hashes: Sequence[str]) -> str:
    """The page hash that a completion is stored under: of the request, its prompt, pool and shard.

    Both sides know all of these, so that nobody has to be asked. A request id that is used again for
    another prompt is another completion.
    """
    digest = hashlib.sha256(b"hicache-handoff-v1")
    for part in (request_id, space.id, hashes[-1]):
        text = id_bytes(part)
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def _printable(request_id: str) -> str:
    """As much of it as people need, with what JSON cannot carry as UTF-8 spelt out."""
    shown = request_id[:_SHOWN_CHARACTERS].encode(errors="backslashreplace").decode()
    return shown[:_SHOWN_CHARACTERS]
