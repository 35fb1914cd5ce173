"""The ranks of one engine: the protocol by which they agree, and the topics they agree on."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN_CHARACTERS = 200


class Channel(enum.Enum):
    """A sequence of all-reduces of one thread, so that the threads never wait for each other."""

    MATCH = "match"
    """The pages that L2 and L3 have of a prefix. The prefetching thread uses it, in request order."""
    RESULT = "result"
    """The pages that have arrived, and the pages that are claimed. The engine's thread uses it, in the
    order in which it takes the results."""


class RanksLost(HiCacheError):
    """A rank did not answer, or asked another question: nothing can be agreed on any more."""


class Ranks(Protocol):
    """The ranks that run one engine together: tensor parallel and pipeline parallel.

    Every rank makes the same calls, with as many values, in the same order on each channel. A rank that
    failed at something answers with zeros.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0 to `size` - 1."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
        """Return the minimum over all ranks of each value. Block until all ranks have answered.

        Raises:
            RanksLost: A rank did not answer within the time allowed, here or on another rank.
        """
        ...

    def close(self) -> None:
        """Leave the other ranks; a rank that waits for this one loses it. Thread-safe, idempotent."""
        ...


class SingleRank:
    """The only rank of an engine of one process."""

    rank = 0
    size = 1

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:  # noqa: ARG002 - the protocol's
        """Return the values."""
        return list(values)

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Topic:
    """The subject of an all-reduce, such as one request. Ranks compare it to detect that they differ."""

    label: str
    """The topic for messages."""
    digest: bytes
    """The topic for comparison: equal on two ranks that have the same topic."""

    @classmethod
    def of_request(cls, request_id: str, hashes: Sequence[str]) -> Self:
        """Return the topic of a request and its prompt: the same id with another prompt differs."""
        parts = (utf8_bytes(request_id), ",".join(hashes).encode())
        return cls.of(f"request {shown_id(request_id)}", parts)

    @classmethod
    def of(cls, label: str, parts: Sequence[bytes] = ()) -> Self:
        """Return the topic that `label` and `parts` identify."""
        digest = hashlib.sha256()
        for part in (utf8_bytes(label), *parts):
            digest.update(len(part).to_bytes(8, "little") + part)
        return cls(label, digest.digest())

    def code(self, question: str, length: int) -> int:
        """Return 62 bits of a digest of the topic, the question and the number of values.

        The code and its negative fit into the 64-bit integers that ranks exchange.
        """
        digest = hashlib.sha256(self.digest + utf8_bytes(f"{length} {question}")).digest()
        return int.from_bytes(digest[:8], "little") >> 2


def utf8_bytes(text: str) -> bytes:
    """Return `text` as UTF-8. JSON from a client can hold lone surrogates, which plain UTF-8 refuses."""
    return text.encode("utf-8", "surrogatepass")


def shown_id(request_id: str) -> str:
    """Return a request id for messages: quoted, printable, and cut where it is long."""
    if len(request_id) <= _SHOWN_CHARACTERS:
        return repr(request_id)
    return f"{request_id[:_SHOWN_CHARACTERS]!r}... of {len(request_id)} characters"
