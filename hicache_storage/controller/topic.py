"""What ranks speak of when they agree on something, and how request ids are written and shown."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Topic:
    """The subject of one question to all ranks."""

    told: str
    """For messages."""
    digest: bytes
    """Equal on two ranks where they speak of the same thing."""

    @classmethod
    def of_request(cls, request_id: str, hashes: Sequence[str]) -> Self:
        """A request and its prompt: an id that is used for another prompt is another topic."""
        parts = (id_bytes(request_id), ",".join(hashes).encode())
        return cls.of(f"request {shown(request_id)}", parts)

    @classmethod
    def of(cls, told: str, parts: Sequence[bytes] = ()) -> Self:
        """Whatever else there is to agree on."""
        digest = hashlib.sha256()
        for part in (id_bytes(told), *parts):
            digest.update(len(part).to_bytes(8, "little") + part)
        return cls(told, digest.digest())

    def code(self, question: str, length: int) -> int:
        """62 bits of it and of the question: they and their negative fit into the ranks' 64."""
        told = hashlib.sha256(self.digest + id_bytes(f"{length} {question}")).digest()
        return int.from_bytes(told[:8], "little") >> 2


def id_bytes(text: str) -> bytes:
    """Any string a client can send. JSON can carry lone surrogates, which plain UTF-8 refuses."""
    return text.encode("utf-8", "surrogatepass")


def shown(request_id: str) -> str:
    """A request id for messages: quoted, printable, and cut where it is long."""
    if len(request_id) <= _SHOWN_CHARACTERS:
        return repr(request_id)
    return f"{request_id[:_SHOWN_CHARACTERS]!r}... of {len(request_id)} characters"
