"""Values chosen by the bytes of an input, so that a mutated input gives similar values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

CANARY = "c4nary-secret"
"""A text in place of a secret. No message may contain it."""

_NUMBERS: tuple[Any, ...] = (0, 1, -1, 0.5, 7, 1e300, -0.0, 2**31, 2**63 - 1, 2**63, 10**400, 1e-9)
_TEXTS = (
    *("", "0", "1", "-1", "true", "off", "90s", "1\u017f", "1GiB", "1K\u0131B", "1e999", "\u0663"),
    *(
        "redis://localhost",
        "unix:///tmp/x",
        "http://h:9",
        "host:1",
        "[::1]:9",
        "sqlite",
        "tcp://*:1",
    ),
    *(
        "xxh3",
        "none",
        "auto",
        "crc32",
        "rdma",
        "power",
        "~",
        "/nowhere",
        "a\0b",
        "\udc80",
        "@",
        "i/n",
    ),
    *("0/2", "LOCAL", "*", "\u2100", "AES256", "file", "memory", "redis", "TieringOffloadingSpec"),
)
_SECRETS = (
    *(CANARY, f"redis://:{CANARY}@h", f"redis://{CANARY}:{CANARY}@h:x", f"http://{CANARY}@h"),
    *(
        f"rediss://u:{CANARY}@h/0?ssl_cert_reqs={CANARY}",
        f"http://u:{CANARY}\u2100@h",
        f"//{CANARY}",
    ),
    *(f"http://[{CANARY}", f"redis://h?db={CANARY}", f"s3://{CANARY}@b::x", f"[{CANARY}]"),
)


class Choices:
    """Choices that read the bytes of an input from its start. After its end, the bytes are zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integer(self, least: int, most: int) -> int:
        """Return a number from `least` to `most`."""
        span = most - least
        nbytes = (span.bit_length() + 7) >> 3
        return least + int.from_bytes(self.take(nbytes), "little") % (span + 1)

    def flag(self) -> bool:
        """Return True or False."""
        return bool(self.integer(0, 1))

    def pick(self, items: Sequence[T]) -> T:
        """Return one of `items`."""
        return items[self.integer(0, len(items) - 1)]

    def chunk(self, most: int) -> bytes:
        """Return up to `most` bytes."""
        return self.take(self.integer(0, most))

    def text(self, most: int = 40) -> str:
        """Return text, which may hold lone surrogates as JSON's may."""
        return self.chunk(most).decode("utf-8", "surrogateescape")

    def rest(self) -> bytes:
        """Return all bytes that are left."""
        return self.take(len(self._data))

    def patched(self, data: bytes, most: int = 4) -> bytes:
        """Return `data` with up to `most` bytes changed, and perhaps cut or made longer."""
        changed = bytearray(data)
        for _ in range(self.integer(0, most)):
            if changed:
                changed[self.integer(0, len(changed) - 1)] ^= self.integer(0, 255)
        if self.integer(0, 7) == 1:
            del changed[self.integer(0, len(changed)) :]
        if self.integer(0, 7) == 1:
            changed += self.chunk(80)
        return bytes(changed)

    def plain(self, depth: int = 2) -> Any:
        """Return a value of a type that JSON has."""
        kinds: list[Callable[[], Any]] = [
            lambda: None,
            self.flag,
            lambda: self.pick(_NUMBERS),
            lambda: self.integer(-300, 300),
            lambda: self.pick(_TEXTS),
            lambda: self.pick(_TEXTS),
            lambda: self.pick(_SECRETS),
            self.text,
        ]
        if depth:
            kinds.append(lambda: [self.plain(depth - 1) for _ in range(self.integer(0, 3))])
            kinds.append(lambda: self.fields((), depth - 1))
        return self.pick(kinds)()

    def fields(self, names: Sequence[str], depth: int = 2) -> dict[str, Any]:
        """Return an object with some fields of these names, and a few of other names."""
        found: dict[str, Any] = {}
        for _ in range(self.integer(0, 5)):
            known = bool(names) and self.integer(0, 7) > 0
            name = self.pick(names) if known else self.text(12)
            found[name] = self.plain(depth)
        return found

    def take(self, nbytes: int) -> bytes:
        """Return the next `nbytes`, or as many as are left."""
        start = self._at
        self._at = start + nbytes
        return self._data[start : self._at]
