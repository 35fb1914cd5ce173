"""The ranks of one engine: the protocol that connects them, and the topics on which they agree."""

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
    """A separate sequence of all-reduces for each thread, so that threads do not wait for each other."""

    MATCH = "match"
    """The prefetching thread uses it in request order, to agree on the pages that L2 and L3 have."""
    RESULT = "result"
    """The engine's thread uses it in the order in which it takes results, to agree on the pages that
    have arrived or are claimed."""


class RanksLost(HiCacheError):
    """A rank did not answer, or asked a different question. No further agreement is possible."""


class Ranks(Protocol):
    """The ranks that run one engine together: tensor parallel and pipeline parallel.

    Every rank makes the same calls, with equally many values, in the same order on each channel. A rank
    on which something failed answers with zeros.
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
        """Return the minimum of each value over all ranks. Block until all ranks have answered.

        Raises:
            RanksLost: A rank did not answer within the time allowed, here or on another rank.
        """
        ...

    def close(self) -> None:
        """Leave the other ranks. Thread-safe and idempotent.

        Ranks that wait for this rank get `RanksLost`.
        """
        ...


class SingleRank:
    """The only rank of an engine that runs in one process."""

    rank = 0
    size = 1

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:  # noqa: ARG002 - the protocol's
        return list(values)

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Topic:
    """What an all-reduce is about, such as one request. Ranks compare topics to notice a mismatch."""

    label: str
    """The text that stands for the topic in messages."""
    digest: bytes
    """Equal on two ranks if they have the same topic."""

    @classmethod
    def of_request(cls, request_id: str, hashes: Sequence[str]) -> Self:
        """Return the topic of a request. It depends on the prompt, because clients may reuse an id."""
        parts = (utf8_bytes(request_id), ",".join(hashes).encode())
        return cls.of(f"request {shown_id(request_id)}", parts)

    @classmethod
    def of(cls, label: str, parts: Sequence[bytes] = ()) -> Self:
        """Return the topic for `label` and `parts`."""
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
    """Return `text` as UTF-8, even if it has lone surrogates, which JSON from clients may contain."""
    return text.encode("utf-8", "surrogatepass")


def shown_id(request_id: str) -> str:
    """Return a request id in the form that messages use: quoted, printable, and cut if it is long."""
    if len(request_id) <= _SHOWN_CHARACTERS:
        return repr(request_id)
    return f"{request_id[:_SHOWN_CHARACTERS]!r}... of {len(request_id)} characters"
