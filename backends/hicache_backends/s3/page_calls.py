"""What is asked of the store for one page, and what each answer means.

The table of answers is in docs/backends/s3.md. A write is called refused only where the store can't
have taken it: what may have been lost on the way is looked up, and raised where that does not tell.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.s3.client import FAULTS
from hicache_backends.s3.exchange import Call, Failed
from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.s3.client import Answer, Client
    from hicache_backends.s3.replies import Reply
    from hicache_backends.s3.settings import S3Settings
    from hicache_storage.page import Page

_NO_ROOM_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "EntityTooLarge"})
_WRITTEN = frozenset({200, 201, 204})
_CRC32 = "x-amz-checksum-crc32"


class PageCalls:
    """Makes the calls for single pages, by object name. Thread-safe."""

    def __init__(self, client: Client, settings: S3Settings) -> None:
        self._client = client
        self._counters = client.counters
        self._head_first_nbytes = settings.head_first_nbytes
        self._is_conditional = settings.conditional_puts
        self._checks = settings.checksum == "crc32"
        self._asked = settings.headers
        self._asked_whole = {
            **settings.headers,
            **({"x-amz-checksum-mode": "ENABLED"} if self._checks else {}),
        }
        self._written = settings.written_headers

    def exists(self, name: str, nbytes: int) -> Call[bool]:
        """Whether an object of the right size is there."""
        found = yield from self._size(name)
        if found is not None and found != nbytes:
            self._counters.add("wrong_size")
        return found == nbytes

    def get(self, name: str, page: Page) -> Call[bool]:
        """Read the object into the page."""
        make = partial(
            self._client.request,
            "GET",
            name,
            self._asked_whole,
            into=page.segments,
            into_nbytes=page.nbytes,
        )
        reply, _ = yield from self._client.answered(make)
        if reply.status == 200:
            if not reply.landed:
                self._counters.add("wrong_size")
                return False
            return (yield from self._checked(name, page, reply))
        if self._is_absent(reply):
            self._counters.add("absent")
            return False
        raise self._client.refusal(reply)

    def set(self, name: str, page: Page) -> Call[bool]:
        """Make the page the object, unless it is there."""
        if page.nbytes >= self._head_first_nbytes:
            found = yield from self._size(name)
            if found == page.nbytes:
                self._counters.add("present")
                return True
            return (yield from self._put(name, page, if_absent=found is None))
        return (yield from self._put(name, page, if_absent=True))

    def read(self, name: str) -> Call[bytes | None]:
        """The bytes of a small object; None where there is none."""
        make = partial(self._client.request, "GET", name, self._asked)
        reply, _ = yield from self._client.answered(make)
        if reply.status == 200:
            return reply.body
        if self._is_absent(reply):
            return None
        raise self._client.refusal(reply)

    def write(self, name: str, data: bytes) -> Call[None]:
        """Make `data` a small object."""
        make = partial(self._client.request, "PUT", name, self._written, body=[memoryview(data)])
        reply, _ = yield from self._client.answered(make)
        if reply.status not in _WRITTEN:
            raise self._client.refusal(reply)

    # --- writing -------------------------------------------------------------------------------------

    def _put(self, name: str, page: Page, *, if_absent: bool) -> Call[bool]:
        headers = dict(self._written)
        if self._checks:
            headers["x-amz-sdk-checksum-algorithm"] = "CRC32"
            headers[_CRC32] = _crc32(page.segments)
        if if_absent and self._is_conditional:
            headers["if-none-match"] = "*"
        make = partial(self._client.request, "PUT", name, headers, body=page.segments)
        try:
            answer = yield from self._client.answered(make)
        except Failed as failed:
            if failed.in_doubt and not isinstance(failed.error, StorageTimeout):
                return (yield from self._confirmed(name, page, failed))
            raise
        return (yield from self._written_as(name, page, answer, "if-none-match" in headers))

    def _written_as(
        self,
        name: str,
        page: Page,
        answer: Answer,
        was_conditional: bool,  # noqa: FBT001
    ) -> Call[bool]:
        """What an answer to a PUT means."""
        reply, in_doubt = answer
        if reply.status in _WRITTEN:
            return True
        if reply.status == 412 and was_conditional:
            return (yield from self._set_again(name, page))
        if reply.status == 501 and was_conditional:
            self._is_conditional = False
            return (yield from self._put(name, page, if_absent=False))
        if not in_doubt and (reply.status == 507 or reply.code in _NO_ROOM_CODES):
            self._counters.add("refused_no_space")
            return False
        refusal = self._client.refusal(reply)
        if in_doubt or refusal.in_doubt or reply.status in FAULTS or reply.status == 409:
            failed = Failed(refusal.error, in_doubt=in_doubt or refusal.in_doubt)
            return (yield from self._confirmed(name, page, failed))
        raise refusal

    def _set_again(self, name: str, page: Page) -> Call[bool]:
        """Something is there already: this page, or something that must be replaced."""
        if (yield from self._size(name)) == page.nbytes:
            self._counters.add("present")
            return True
        self._counters.add("replaced")
        return (yield from self._put(name, page, if_absent=False))

    def _confirmed(self, name: str, page: Page, failed: Failed) -> Call[bool]:
        """The page is there after all, or the failure stands."""
        try:
            found = yield from self._size(name)
        except Failed:
            raise failed from None
        if found == page.nbytes:
            self._counters.add("confirmed")
            return True
        raise failed

    # --- reading -------------------------------------------------------------------------------------

    def _size(self, name: str) -> Call[int | None]:
        """The size of an object; None where there is none."""
        make = partial(self._client.request, "HEAD", name, self._asked)
        reply, _ = yield from self._client.answered(make)
        if reply.status == 200:
            if reply.content_length is None:  # neither there nor absent
                raise Failed(StorageUnavailable("s3: the store answers a HEAD without a length"))
            return reply.content_length
        if self._is_absent(reply):
            return None
        raise self._client.refusal(reply)

    def _is_absent(self, reply: Reply) -> bool:
        return reply.status == 404 and reply.code != "NoSuchBucket"

    def _checked(self, name: str, page: Page, reply: Reply) -> Call[bool]:
        """Hold a page against the store's checksum. A wrong one is deleted, so that a set heals it."""
        expected = reply.headers.get(_CRC32) if self._checks else None
        if expected is None or expected == _crc32(page.segments):
            return True
        self._counters.add("wrong_checksum")
        make = partial(self._client.request, "DELETE", name, self._asked)
        yield from self._client.answered(make)
        return False


def _crc32(segments: Sequence[memoryview]) -> str:
    value = 0
    for segment in segments:
        value = zlib.crc32(segment, value)
    return b64encode(value.to_bytes(4, "big")).decode()
