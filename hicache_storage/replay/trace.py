"""Read traces of requests in the Mooncake format, and make synthetic traces.

The format (kvcache-ai/Mooncake, FAST25-release/traces) has one JSON object in each line:

    timestamp                    arrival in ms
    input_length, output_length  tokens
    hash_ids                     prefix-chained ids of the prompt's blocks of 512 tokens

A last block that is only partly filled counts as full, as in the figures published with the traces. The
reader refuses inconsistent files: a prompt with more or fewer ids than its length needs, or a request
that arrives before the previous one.
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hicache_storage.errors import ConfigError, shown
from hicache_storage.request_log import trace as trace_format
from hicache_storage.scalars import MAX_INT64

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt
    from pydantic_core import ErrorDetails

BLOCK_TOKENS = trace_format.BLOCK_TOKENS

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_LINE_CHARACTERS = 1 << 24
_MAX_BLOCK_ID = 2**63 // BLOCK_TOKENS - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    arrival_s: float
    """Seconds since the start of the trace."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the prompt's blocks. Equal ids at equal positions mean equal prefixes."""


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """Read the first `limit` requests of a file in the Mooncake format, gzipped or not.

    Raises:
        ConfigError: The file is invalid. The message names the file and the line.
    """
    requests: list[Request] = []
    latest_s = 0.0
    try:
        for number, line in enumerate(_lines(path), start=1):
            if len(requests) == limit:
                break
            if line.strip():
                where = f"{shown(path)}: line {number}"
                request = _request(line, where)
                _check_order(request.arrival_s, latest_s, where)
                latest_s = request.arrival_s
                requests.append(request)
    except UnicodeDecodeError:
        raise ConfigError(f"{shown(path)}: is not UTF-8 text, gzipped or plain") from None
    except (EOFError, zlib.error):
        raise ConfigError(f"{shown(path)}: the gzip file is damaged or ends too early") from None
    except OSError as error:
        reason = error.strerror or str(error).lower()
        raise ConfigError(f"{shown(path)}: cannot be read: {reason}") from None
    if not requests:
        raise ConfigError(f"{shown(path)}: holds no requests")
    return requests


def block_tokens(blocks: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return the token ids of a prompt: 512 for each block, different for different block ids."""
    import numpy as np  # noqa: PLC0415 - `read_trace` does without it

    narrow = max(blocks, default=0) < 2**32 // BLOCK_TOKENS
    ids = np.array(blocks, dtype=np.uint32 if narrow else np.int64)
    tokens: npt.NDArray[Any] = ids[:, None] * BLOCK_TOKENS + _offsets()
    return tokens.reshape(-1)


@lru_cache(maxsize=1)
def _offsets() -> npt.NDArray[Any]:
    import numpy as np  # noqa: PLC0415

    return np.arange(BLOCK_TOKENS, dtype=np.uint32)


def check_page_tokens(page_tokens: int) -> None:
    """Refuse a page size that does not divide a block of a trace.

    Raises:
        ConfigError: The message names the flag.
    """
    if BLOCK_TOKENS % page_tokens:
        raise ConfigError(
            f"--page-size must divide the trace's blocks of {BLOCK_TOKENS} tokens,"
            f" but {page_tokens} does not"
        )


class InfiniteCache:
    """A cache that starts empty and never evicts. It gives the upper bound of the hits in a trace."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def hits(self, request: Request) -> int:
        """Return how many leading blocks are in the cache. Then add all blocks of the request."""
        new = (n for n, block in enumerate(request.blocks) if block not in self._seen)
        hits = next(new, len(request.blocks))
        self._seen.update(request.blocks)
        return hits


# --- lines of a file -----------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    with (
        gzip.open(path, "rt", encoding="utf-8") if is_gzip else path.open(encoding="utf-8") as text
    ):
        while line := text.readline(_MAX_LINE_CHARACTERS):
            if len(line) == _MAX_LINE_CHARACTERS:
                raise ConfigError(f"{shown(path)}: has a line of {len(line):,} characters or more")
            yield line


class _Line(BaseModel):
    """A line of a file, as the format defines it."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)

    timestamp: Annotated[float, Field(ge=0, le=MAX_INT64)]
    input_length: Annotated[int, Field(ge=0)]
    output_length: Annotated[int, Field(ge=0)]
    hash_ids: list[Annotated[int, Field(ge=0, le=_MAX_BLOCK_ID)]]


_MUST_BE = {
    "timestamp": f"milliseconds from 0 to {MAX_INT64}",
    "input_length": "a whole number, 0 or more",
    "output_length": "a whole number, 0 or more",
    "hash_ids": f"whole numbers from 0 to {_MAX_BLOCK_ID}",
}


def _request(text: str, where: str) -> Request:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg.lower() if isinstance(error, json.JSONDecodeError) else error
        raise ConfigError(f"{where}: is not JSON: {reason}") from None
    try:
        line = _Line.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_problem(error.errors()[0])}") from None
    needed = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != needed:
        raise ConfigError(
            f"{where}: hash_ids: there are {len(line.hash_ids)}, but an input_length"
            f" of {line.input_length} tokens has {needed} blocks of {BLOCK_TOKENS}"
        )
    return Request(
        line.timestamp / 1000, line.input_length, line.output_length, tuple(line.hash_ids)
    )


def _problem(detail: ErrorDetails) -> str:
    """Return what is wrong with a line."""
    value = detail["input"]
    if not detail["loc"]:
        return f"must be an object, not {type(value).__name__}"
    name = str(detail["loc"][0])
    if detail["type"] == "missing":
        return f"{name}: this field is required"
    if detail["type"] == "list_type":
        return f"{name}: must be a list, not {type(value).__name__}"
    return f"{name}: must be {_MUST_BE[name]}, not {value!r:.40}"


def _check_order(arrival_s: float, latest_s: float, where: str) -> None:
    if arrival_s < latest_s:
        raise ConfigError(
            f"{where}: timestamp: {1000 * arrival_s:g} ms is earlier than {1000 * latest_s:g} ms of the"
            " request before it: sort the file by timestamp"
        )


# --- a synthetic trace -----------------------------------------------------------------------------

_ARRIVAL_GAP_S = 4.0
_TURN_GAP_S = 45.0
_NEXT_TURN_SHARE = 0.75
_SYSTEM_PROMPT_BLOCKS = (1, 2, 4, 6)


def synthetic_trace(seed: int, *, conversations: int, limit: int | None = None) -> list[Request]:
    """Return the first `limit` requests of multi-turn conversations that overlap in time.

    Equal arguments make equal requests, and a limit does not change them. Each conversation starts
    with one of a few shared system prompts. The prompt of a turn is the conversation so far,
    including answers, plus a new question. Its full blocks are used again in the next turn, its last
    block is not.
    """
    rng = random.Random(seed)
    fresh = count()
    systems = [tuple(islice(fresh, blocks)) for blocks in _SYSTEM_PROMPT_BLOCKS]
    starts = _starts(rng, conversations)
    turns: list[tuple[float, int, _Conversation]] = []
    requests: list[Request] = []
    upcoming = next(starts, None)
    for order in count():
        if len(requests) == limit:
            break
        if upcoming is not None and (not turns or upcoming <= turns[0][0]):
            conversation = _Conversation(rng.choice(systems))
            heapq.heappush(turns, (upcoming, order, conversation))
            upcoming = next(starts, None)
        if not turns:
            break
        time_s, _, conversation = heapq.heappop(turns)
        requests.append(conversation.turn(time_s, rng, fresh))
        if rng.random() < _NEXT_TURN_SHARE:
            next_s = time_s + rng.expovariate(1 / _TURN_GAP_S)
            heapq.heappush(turns, (next_s, order, conversation))
    return requests


def _starts(rng: random.Random, conversations: int) -> Iterator[float]:
    time_s = 0.0
    for _ in range(conversations):
        yield time_s
        time_s += rng.expovariate(1 / _ARRIVAL_GAP_S)


class _Conversation:
    """The text of a conversation so far, as full blocks and remaining tokens."""

    def __init__(self, system: tuple[int, ...]) -> None:
        self._blocks = list(system)
        self._remainder = 0

    def turn(self, time_s: float, rng: random.Random, fresh: Iterator[int]) -> Request:
        self._append(_length(rng, 500), fresh)
        tail = (next(fresh),) if self._remainder else ()
        prompt_tokens = len(self._blocks) * BLOCK_TOKENS + self._remainder
        request = Request(time_s, prompt_tokens, _length(rng, 350), (*self._blocks, *tail))
        self._append(request.output_tokens, fresh)
        return request

    def _append(self, tokens: int, fresh: Iterator[int]) -> None:
        full, self._remainder = divmod(self._remainder + tokens, BLOCK_TOKENS)
        self._blocks += islice(fresh, full)


def _length(rng: random.Random, median: int) -> int:
    """Return a random message length in tokens. Most messages are short, and a few are long."""
    return max(1, min(32 * median, round(median * rng.lognormvariate(0.0, 1.0))))
