"""Record traces in the Mooncake format, which `hicache plan` and `hicache replay` read.

A block's id is 54 bits of the hash of the block's last page. Page hashes are chained, so equal ids mean
equal prefixes, in the traces of all engines whose page hashes are equal.
"""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError
from hicache_storage.request_log.line_writer import LineWriter
from hicache_storage.request_log.log_file import LogFile
from hicache_storage.request_log.settings import path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.request_log.settings import TraceSettings

BLOCK_TOKENS = 512
"""The number of tokens in a block of a trace."""
_HASH_NBYTES = 8
_SPARE_BITS = 10
"""A replay has token ids of 63 bits, and nine of these distinguish the tokens in a block."""
_IDS = 1 << 8 * _HASH_NBYTES - _SPARE_BITS


class TraceRecorder:
    """A recorder of one engine's requests as a trace. Thread-safe. `record` never waits or raises."""

    def __init__(
        self, file: LogFile, page_tokens: int, *, clock: Callable[[], int] = time.time_ns
    ) -> None:
        """Open the file, and start the thread that writes it. Pages have `page_tokens` tokens.

        `clock` returns nanoseconds since 1970.

        Raises:
            ValueError: Neither a page nor a block is a multiple of the other.
            OSError: The file cannot be written.
        """
        if BLOCK_TOKENS % page_tokens and page_tokens % BLOCK_TOKENS:
            raise ValueError(
                f"a trace has blocks of {BLOCK_TOKENS} tokens, which pages of {page_tokens} tokens"
                " do not fill: use a page size of 16, 32, 64, 128, 256 or 512 tokens"
            )
        self._page_tokens = page_tokens
        self._block_pages = max(1, BLOCK_TOKENS // page_tokens)
        self._page_blocks = max(1, page_tokens // BLOCK_TOKENS)
        self._writer = LineWriter(file)
        self._clock = clock
        self._lock = threading.Lock()
        self._latest_ms = 0

    @property
    def dropped_requests(self) -> int:
        """The number of requests dropped so far."""
        return self._writer.dropped_lines

    def record(self, hashes: Sequence[str] | Sequence[bytes]) -> None:
        """Record a request whose prompt has these full pages. Ignore a prompt without a full page."""
        if not hashes:
            return
        pages = len(hashes)
        ends: list[str | bytes] = [*hashes[self._block_pages - 1 :: self._block_pages]]
        if pages % self._block_pages:
            ends.append(hashes[-1])
        with self._lock:  # a clock may go back, but the lines of a trace must be in order
            self._latest_ms = max(self._latest_ms, self._clock() // 1_000_000)
            self._writer.add(partial(self._line, self._latest_ms, pages, ends))

    def close(self) -> None:
        """Write the waiting lines, for at most some seconds, and end the thread. Idempotent."""
        self._writer.close()

    def _line(self, at_ms: int, pages: int, ends: Sequence[str | bytes]) -> str:
        found = {
            "timestamp": at_ms,
            "input_length": pages * self._page_tokens,
            "output_length": 0,
            "hash_ids": [
                (block_id(page_hash) + part) % _IDS
                for page_hash in ends
                for part in range(self._page_blocks)
            ],
        }
        return json.dumps(found, separators=(",", ":")) + "\n"


def block_id(page_hash: str | bytes) -> int:
    """Return the id of the block whose last page has this hash, given as hex digits or bytes."""
    if isinstance(page_hash, str):
        page_hash = bytes.fromhex(page_hash[: 2 * _HASH_NBYTES])
    return int.from_bytes(page_hash[:_HASH_NBYTES], "big") >> _SPARE_BITS


def open_trace(settings: TraceSettings, page_tokens: int, *, engine: str) -> TraceRecorder | None:
    """Open the trace named in an adapter's settings. Return None if none is named.

    Raises:
        ConfigError: The file cannot be written, or the page size does not fit a trace.
    """
    if not settings.trace:
        return None
    file = LogFile(path_of(settings.trace), settings.log_file_nbytes, alone=True)
    try:
        return TraceRecorder(file, page_tokens)
    except ValueError as error:
        raise ConfigError(f"{engine}: trace: {error}") from None
    except OSError as error:
        raise ConfigError(
            f"{engine}: trace: {settings.trace} cannot be written: {error.strerror or error}"
        ) from None
