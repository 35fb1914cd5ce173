"""Ways in which one tenant may try to name pages of another, by fields, hashes and prefixes."""

from __future__ import annotations

import json
import random
import struct
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hicache_storage.keys import KeySpace, Shard

TEXT_FIELDS = ("model", "dtype", "layout", "pool", "revision", "tenant")
VICTIM = KeySpace(
    model="meta-llama/Llama-3.1-8B-Instruct",
    dtype="bfloat16",
    layout="page_first",
    page_tokens=16,
    page_nbytes=256,
    shard=Shard(layers=(0, 32), heads=(0, 8)),
    revision="a1b2",
    tenant="Bank/Zürich",
    frame_nbytes=128,
)

_LOOKALIKES = str.maketrans(
    {"a": "\u0430", "e": "\u0435", "o": "\u043e", "B": "\u0392", "i": "\u0456", "/": "\u2215"}
)
_WIDE = {ord(digit): chr(ord(digit) + 0xFEE0) for digit in "0123456789abcdef"}
_INSERTED = (
    *("", " ", "\t", "\n", "\r\n", "\0", "\x7f", "\u200b", "\u200d", "\u202e", "\ufeff", "\u0301"),
    *("/", "//", "/../", "/./", "\\", "%2F", "%00", ":", "}", "{", "@", ";", "=", ",", "*", "?"),
    *('"', "'", '","tenant":"', "tenant=", "$", "`", "--", ".json", "~", "|", "\x1b[0m"),
)


class Attacker:
    """A source of attempts that depend on its seed. No attempt has the tenant of the victim."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def attempts(self, page_hash: str) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yield fields of a key space and a page hash, without end. Both may be invalid."""
        while True:
            fields = self._fields()
            if str(fields["tenant"]) != VICTIM.tenant:
                yield fields, self._hash(page_hash)

    def prefix(self, prefix: str) -> str:
        """Return a text that might be taken for a victim's prefix in a shared database or bucket."""
        own = self._random.choice([f"{VICTIM.id}", "spaces", VICTIM.id[:2], "a", "..", ""])
        pick = self._random.choice
        return pick(
            [prefix, f"{prefix}{own}", f"{prefix}{own}/", f"{own}{prefix}", prefix[:-1], own]
        )

    def _fields(self) -> dict[str, Any]:
        fields = {name: getattr(VICTIM, name) for name in TEXT_FIELDS}
        numbers = ("page_tokens", "page_nbytes", "frame_nbytes", "shard")
        fields |= {name: getattr(VICTIM, name) for name in numbers}
        if self._random.randrange(4):
            fields["tenant"] = self._changed(self._random.choice([VICTIM.tenant, "", "other"]))
        for _ in range(self._random.randrange(3)):
            self._random.choice(_FIELD_TRICKS)(self, fields)
        return fields

    def _changed(self, text: str) -> Any:
        tricks: list[Callable[[str], Any]] = [
            str.upper, str.lower, str.swapcase, str.title, str.casefold, str.strip,
            lambda it: unicodedata.normalize(self._random.choice(("NFC", "NFD", "NFKC", "NFKD")), it),
            lambda it: it.translate(_LOOKALIKES),
            lambda it: it[::-1],
            lambda it: it[: self._random.randrange(len(it) + 1)],
            lambda it: it[self._random.randrange(len(it) + 1) :],
            lambda it: it * self._random.randrange(4),
            lambda it: _bytes_of(it).decode("latin-1"),
            json.dumps,
            lambda it: it + self._random.choice([VICTIM.id, VICTIM.tenant, VICTIM.model]),
            lambda it: self._random.choice([VICTIM.id, VICTIM.tenant, VICTIM.model]) + it,
            np.str_,
            _bytes_of,
            lambda it: f"{it}\udc80",
            self._inserted, self._inserted, self._inserted,
        ]  # fmt: skip
        changed: Any = text
        for _ in range(self._random.randrange(1, 4)):
            if isinstance(changed, str):
                changed = self._random.choice(tricks)(changed)
        return changed

    def _inserted(self, text: str) -> str:
        place = self._random.randrange(len(text) + 1)
        return text[:place] + self._random.choice(_INSERTED) + text[place:]

    def _change_one(self, fields: dict[str, Any]) -> None:
        name = self._random.choice(TEXT_FIELDS)
        fields[name] = self._changed(str(fields[name]))

    def _move_text(self, fields: dict[str, Any]) -> None:
        """Move the end of one field to the beginning of another, so that both together stay the same."""
        first, second = self._random.sample(TEXT_FIELDS, 2)
        text = str(fields[first])
        place = self._random.randrange(len(text) + 1)
        fields[first], fields[second] = text[:place], text[place:] + str(fields[second])

    def _encode_fields(self, fields: dict[str, Any]) -> None:
        """Let a field contain the encoding of the victim's tenant, as it goes into the id's hash."""
        name = self._random.choice(("revision", "model", "pool"))
        encoded = "".join(map(_encoded, (str(fields[name]), "tenant", VICTIM.tenant)))
        fields[name] = f"{fields[name]}{encoded}"

    def _exchange(self, fields: dict[str, Any]) -> None:
        first, second = self._random.sample(TEXT_FIELDS, 2)
        fields[first], fields[second] = fields[second], fields[first]

    def _change_sizes(self, fields: dict[str, Any]) -> None:
        total = VICTIM.stored_nbytes
        frame = self._random.choice([0, 1, 128, 256, total - 1, total, -1])
        fields |= {"frame_nbytes": frame, "page_nbytes": total - frame}
        fields["page_tokens"] = self._random.choice([16, np.int64(16), "16", 16.0, True, 15, 17])

    def _change_shard(self, fields: dict[str, Any]) -> None:
        fields["shard"] = self._random.choice(
            [
                Shard(layers=(0, 32)),
                Shard(layers=(0, 32), heads=(0, 8), context=(0, 1)),
                Shard(layers=(0, 3), heads=(2, 8)),
                None,
            ]
        )

    def _hash(self, page_hash: str) -> Any:
        other = f"{self._random.getrandbits(256):064x}"
        pick = self._random.randrange(80)
        tricks: list[Any] = [
            page_hash.upper(), page_hash.translate(_WIDE), f"{page_hash}\n", f" {page_hash}",
            f"../{VICTIM.id}/{page_hash}", f"../../{VICTIM.id}/{page_hash[:2]}/{page_hash}",
            f"{VICTIM.id}{page_hash}", f"{VICTIM.id}/{page_hash}", f"{page_hash}\0",
            f"{{{VICTIM.id}:{page_hash[:2]}}}{page_hash}", f"{page_hash[:2]}}}{page_hash}",
            "*", f"{page_hash[:-1]}?", page_hash[:-1], page_hash[:-2], page_hash + "00",
            page_hash[:2] + page_hash, page_hash * 2, page_hash * 3, "", f"0x{page_hash}",
            page_hash.replace("0", "\u0660"), other,
        ]  # fmt: skip
        return tricks[pick] if pick < len(tricks) else page_hash


_FIELD_TRICKS = (
    Attacker._change_one,
    Attacker._move_text,
    Attacker._encode_fields,
    Attacker._exchange,
    Attacker._change_sizes,
    Attacker._change_shard,
)


def _encoded(text: str) -> str:
    """Return a text in the encoding that a key space's id hashes: its length, then the text."""
    return "s" + struct.pack("<Q", len(_bytes_of(text))).decode("latin-1") + text


def _bytes_of(text: str) -> bytes:
    """Return a text as UTF-8, lone surrogates included."""
    return text.encode(errors="surrogatepass")


def made(fields: dict[str, Any]) -> KeySpace | None:
    """Return the key space with these fields, or None if they are refused."""
    try:
        return KeySpace(**fields)
    except (TypeError, ValueError):
        return None
