"""Completions: small pages with which a writer announces that a request's pages are in storage."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hicache_storage.controller.ranks import utf8_bytes
from hicache_storage.keys import Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace

_SHOWN_CHARACTERS = 200


class Completion(BaseModel):
    """The stored prefix of one request, in one shard of one pool.

    A completion is stored under `completion_hash`. The page store verifies that a completion belongs to
    the key under which it was read. The decode side checks the fields. People can read them, too.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    request_id: str
    """The request id, for people who read the completion. A long id is cut."""
    pool: str
    shard: Shard
    space_id: str
    """Id of the pages' key space, without a frame."""
    prompt_pages: int = Field(ge=0)
    """Number of pages in the request."""
    pages: int = Field(ge=0)
    """Length of the longest usable prefix in storage, in pages."""
    last_page_hash: str = ""
    """Hash of the prefix's last page. Hashes are chained, so this hash identifies the whole prefix."""
    written_at_s: float
    """Unix time when the completion was written."""

    @classmethod
    def of(
        cls, request_id: str, space: KeySpace, hashes: Sequence[str], pages: int, now_s: float
    ) -> Completion:
        """Return the completion of `pages` leading pages of `hashes` in `space`."""
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
        """Return a page of `nbytes`: JSON, padded with zeros.

        Raises:
            ValueError: The JSON does not fit, because the pool's name is too long.
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
        """Return the completion in `data`, or None if this version cannot read it."""
        try:
            return cls.model_validate_json(data.rstrip(b"\0"))
        except ValidationError:
            return None

    def matches(self, space: KeySpace, hashes: Sequence[str]) -> bool:
        """Return True if the completion is for `hashes` in `space`."""
        if self.space_id != space.id or self.pages > len(hashes):
            return False
        return self.last_page_hash == (hashes[self.pages - 1] if self.pages else "")


def completion_hash(request_id: str, space: KeySpace, hashes: Sequence[str]) -> str:
    """Return the page hash of a completion, made from the request, the prompt, the pool and the shard.

    Both sides can compute it. If a request id is reused for another prompt, the hash is different.
    """
    digest = hashlib.sha256(b"hicache-handoff-v1")
    for part in (request_id, space.id, hashes[-1]):
        text = utf8_bytes(part)
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def _printable(request_id: str) -> str:
    """Return the start of a request id. Escape lone surrogates, which UTF-8 cannot encode."""
    shown = request_id[:_SHOWN_CHARACTERS].encode(errors="backslashreplace").decode()
    return shown[:_SHOWN_CHARACTERS]
