"""The calls for one page, and how answers map to results.

docs/backends/s3.md has the table of answers. A write is reported as refused only if the store can't
have executed it. If the answer to a write was lost, the page is looked up; if the lookup does not
confirm the write, the call raises.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.s3.client import FAULTS
from hicache_backends.s3.losses import CallFailed
from hicache_storage.backend_support.revocable import for_each_piece
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_backends.s3.client import Answer, Client
    from hicache_backends.s3.exchange import Call
    from hicache_backends.s3.replies import Reply
    from hicache_backends.s3.settings import S3Settings

_NO_SPACE_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "EntityTooLarge"})
_WRITTEN = frozenset({200, 201, 204})
_CRC32 = "x-amz-checksum-crc32"


class PageCalls:
    """The calls for single pages, by object name. Thread-safe.

    A call raises RevokedError if the memory of its page was revoked too early.
    """

    def __init__(self, client: Client, settings: S3Settings, *, heals: bool = True) -> None:
        self._client = client
        self._heals = heals
        self._counters = client.counters
        self._head_first_nbytes = settings.head_first_nbytes
        self._is_conditional = settings.conditional_puts
        self._has_checksums = settings.checksum == "crc32"
        self._read_headers = settings.headers
        self._page_headers = {
            **settings.headers,
            **({"x-amz-checksum-mode": "ENABLED"} if self._has_checksums else {}),
        }
        self._write_headers = settings.write_headers
        self._conditional_headers = {**self._write_headers, "if-none-match": "*"}

    def exists(self, name: str, nbytes: int) -> Call[bool]:
        """Return True if an object of the right size exists."""
        found = yield from self._size(name)
        if found is not None and found != nbytes:
            self._counters.add("wrong_size")
        return found == nbytes

    def get(self, name: str, page: Page) -> Call[bool]:
        """Read the object into the page."""
        reply = yield from self._read_page(name, page)
        if reply.status == 200:
            if not reply.is_page_filled:
                self._counters.add("wrong_size")
                return False
            return (yield from self._verify_checksum(name, page, reply))
        if self._is_absent(reply):
            self._counters.add("absent")
            return False
        raise self._client.refusal(reply)

    def fault(self, name: str, nbytes: int) -> Call[tuple[str, str] | None]:
        """Return the reason and detail if the object is damaged, or None if it is right or absent."""
        found = yield from self._size(name)
        if found is None:
            return None
        if found != nbytes:
            return "wrong_size", f"it is {found:,} bytes long instead of {nbytes:,}"
        if not self._has_checksums:
            return None
        page = Page(bytearray(nbytes))
        reply = yield from self._read_page(name, page)
        if reply.is_page_filled and not _is_crc_right(page, reply):
            return "corrupt", "its bytes do not match the checksum that the store has of them"
        if reply.status == 200 or self._is_absent(reply):  # the object has changed meanwhile
            return None
        raise self._client.refusal(reply)

    def _read_page(self, name: str, page: Page) -> Call[Reply]:
        make = partial(self._client.object_request, "GET", name, self._page_headers, into=page)
        return (yield from self._client.send(make)).reply

    def set(self, name: str, page: Page) -> Call[bool]:
        """Store the page, unless the object exists."""
        if page.nbytes >= self._head_first_nbytes:
            found = yield from self._size(name)
            if found == page.nbytes:
                self._counters.add("present")
                return True
            return (yield from self._put(name, page, if_absent=found is None))
        return (yield from self._put(name, page, if_absent=True))

    def read(self, name: str) -> Call[bytes | None]:
        """Return the bytes of a small object, or None if it is absent."""
        make = partial(self._client.object_request, "GET", name, self._read_headers)
        reply = (yield from self._client.send(make)).reply
        if reply.status == 200:
            return reply.body
        if self._is_absent(reply):
            return None
        raise self._client.refusal(reply)

    def written_at_s(self, name: str) -> Call[float | None]:
        """Return an object's time in seconds since 1970, or None if it is absent or unknown."""
        make = partial(self._client.object_request, "HEAD", name, self._read_headers)
        reply = (yield from self._client.send(make)).reply
        if reply.status != 200:
            return None
        try:
            return parsedate_to_datetime(reply.headers.get("last-modified", "")).timestamp()
        except (ValueError, OverflowError):  # another form, or out of range
            return None

    def write(self, name: str, data: bytes) -> Call[None]:
        """Store a small object."""
        make = partial(
            self._client.object_request, "PUT", name, self._write_headers, body=Page(data)
        )
        reply = (yield from self._client.send(make)).reply
        if reply.status not in _WRITTEN:
            raise self._client.refusal(reply)

    # --- writing -------------------------------------------------------------------------------------

    def _put(self, name: str, page: Page, *, if_absent: bool) -> Call[bool]:
        is_conditional = if_absent and self._is_conditional
        headers = self._conditional_headers if is_conditional else self._write_headers
        if self._has_checksums:
            checksum = {_CRC32: _crc32(page)}
            headers = {**headers, "x-amz-sdk-checksum-algorithm": "CRC32", **checksum}
        make = partial(
            self._client.object_request,
            "PUT",
            name,
            headers,
            body=page,
            is_common=not self._has_checksums,
        )
        try:
            answer = yield from self._client.send(make)
        except CallFailed as failed:
            if failed.in_doubt and not isinstance(failed.error, StorageTimeout):
                return (yield from self._confirm_put(name, page, failed))
            raise
        return (yield from self._put_result(name, page, answer, is_conditional))

    def _put_result(
        self,
        name: str,
        page: Page,
        answer: Answer,
        was_conditional: bool,  # noqa: FBT001
    ) -> Call[bool]:
        """Return the result for an answer to a PUT."""
        reply, in_doubt, was_repeated = answer
        if reply.status in _WRITTEN:
            return True
        if reply.status == 412 and was_conditional:
            return (yield from self._keep_or_replace(name, page))
        if reply.status == 501 and was_conditional:
            self._is_conditional = False
            return (yield from self._put(name, page, if_absent=False))
        if not in_doubt and (reply.status == 507 or reply.code in _NO_SPACE_CODES):
            if was_repeated and (yield from self._is_there(name, page)):
                return True
            self._counters.add("refused_no_space")
            return False
        refusal = self._client.refusal(reply)
        failed = CallFailed(refusal.error, in_doubt=in_doubt or refusal.in_doubt)
        if failed.in_doubt or was_repeated or reply.status in FAULTS or reply.status == 409:
            return (yield from self._confirm_put(name, page, failed))
        raise failed

    def _keep_or_replace(self, name: str, page: Page) -> Call[bool]:
        """Keep the existing object if it has the size of this page. Otherwise replace it."""
        if (yield from self._size(name)) == page.nbytes:
            self._counters.add("present")
            return True
        self._counters.add("replaced")
        return (yield from self._put(name, page, if_absent=False))

    def _confirm_put(self, name: str, page: Page, failed: CallFailed) -> Call[bool]:
        """Return True if the page exists after all. Otherwise raise `failed`."""
        if (yield from self._is_there(name, page)):
            return True
        raise failed

    def _is_there(self, name: str, page: Page) -> Call[bool]:
        """Return True if the page exists after a PUT that failed. Raise if the store does not answer."""
        try:
            found = yield from self._size(name)
        except CallFailed as unknown:
            raise CallFailed(unknown.error, in_doubt=True) from None
        self._counters.add("confirmed", int(found == page.nbytes))
        return found == page.nbytes

    # --- reading -------------------------------------------------------------------------------------

    def _size(self, name: str) -> Call[int | None]:
        """Return the size of an object, or None if it is absent."""
        make = partial(self._client.object_request, "HEAD", name, self._read_headers)
        reply = (yield from self._client.send(make)).reply
        if reply.status == 200:
            if reply.content_length is None:  # the object may be present or absent
                raise CallFailed(
                    StorageUnavailable("s3: the store answers a HEAD without a length")
                )
            return reply.content_length
        if self._is_absent(reply):
            return None
        raise self._client.refusal(reply)

    def _is_absent(self, reply: Reply) -> bool:
        return reply.status == 404 and reply.code != "NoSuchBucket"

    def _verify_checksum(self, name: str, page: Page, reply: Reply) -> Call[bool]:
        """Compare a page with the store's checksum. Delete a wrong object, so that a set heals it.

        The condition on the ETag protects a page that another process has set in the meantime.
        Stores without conditional deletes ignore the condition, or refuse the request, which is
        then repeated without it.
        """
        if not self._has_checksums or _is_crc_right(page, reply):
            return True
        self._counters.add("wrong_checksum")
        if self._heals:
            etag = reply.headers.get("etag")
            if not etag or (yield from self._delete(name, {"if-match": etag})).status == 501:
                yield from self._delete(name, {})
        return False

    def _delete(self, name: str, condition: Mapping[str, str]) -> Call[Reply]:
        headers = {**self._read_headers, **condition}
        make = partial(self._client.object_request, "DELETE", name, headers, is_common=False)
        return (yield from self._client.send(make)).reply


def _is_crc_right(page: Page, reply: Reply) -> bool:
    """Return False if the reply has a checksum of the whole object that differs from the page's.

    An object that was uploaded in parts has a checksum of its parts' checksums.
    """
    expected = reply.headers.get(_CRC32, "-")
    is_of_parts = reply.headers.get("x-amz-checksum-type", "FULL_OBJECT") != "FULL_OBJECT"
    return is_of_parts or "-" in expected or expected == _crc32(page)


def _crc32(page: Page) -> str:
    value = 0

    def add(piece: memoryview) -> None:
        nonlocal value
        value = zlib.crc32(piece, value)

    for_each_piece(page, add)
    return b64encode(value.to_bytes(4, "big")).decode()
