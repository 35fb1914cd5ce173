"""Compare `page_hashes` with the bare hashlib loop that every implementation of it contains.

python benchmarks/page_hashes.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from _harness import Aim, Candidate, Parser, Report, Section

from hicache_storage.keys import page_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOKENS = 131_072
PAGE_TOKENS = 64
LIMIT = "hashlib alone"


class Hashing(Candidate):
    """A candidate that hashes one prompt, and compares the result with the reference."""

    def __init__(self, name: str, work: Callable[[], list[str]], expected: list[str]) -> None:
        self.name = name
        self._work = work
        self._expected = expected
        self._found: list[str] = []

    def prepare(self, turn: int) -> None:  # noqa: ARG002 - every turn is the same
        self._found = []

    def run(self) -> None:
        self._found = self._work()

    def check(self) -> None:
        if self._found != self._expected:
            raise RuntimeError(f"{self.name} gives other hashes")


def limit_of(blocks: Sequence[bytes]) -> list[str]:
    """Hash each prepared buffer with SHA-256, as hex. This is the least work that is possible."""
    sha256 = hashlib.sha256
    return [sha256(block).hexdigest() for block in blocks]


def chained(tokens: Sequence[int], *, bigram: bool) -> list[bytes]:
    """Return the input of each page's hash: the previous digest, then the tokens, added one by one."""
    words = [token.to_bytes(4, "little") for token in tokens]
    if bigram:
        words = [first + second for first, second in pairwise(words)]
    blocks: list[bytes] = []
    digest = b""
    for start in range(0, len(words), PAGE_TOKENS):
        blocks.append(digest + b"".join(words[start : start + PAGE_TOKENS]))
        digest = hashlib.sha256(blocks[-1]).digest()
    return blocks


def bench(report: Report, rounds: int, *, bigram: bool) -> Section:
    """Measure all kinds of input over one prompt."""
    narrow = np.random.default_rng(1).integers(0, 150_000, TOKENS, dtype=np.int32)
    tokens: list[int] = narrow.tolist()
    blocks = chained(tokens, bigram=bigram)
    expected = limit_of(blocks)
    inputs: dict[str, Any] = {
        "int32 array": narrow,
        "int64 array": narrow.astype(np.int64),
        "list": tokens,
    }
    candidates = [Hashing(LIMIT, partial(limit_of, blocks), expected)]
    for name, given in inputs.items():
        work = partial(page_hashes, given, PAGE_TOKENS, bigram=bigram)
        candidates.append(Hashing(name, work, expected))
    return report.measure(
        f"page_hashes, {TOKENS} tokens{' in pairs' if bigram else ''}, pages of {PAGE_TOKENS}",
        candidates,
        rounds,
        work=len(blocks) / 1e6,
        unit="million pages/s",
        baselines=[LIMIT],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = Parser(__doc__, rounds=101).parsed(arguments)
    report = Report.begin(distributions=["numpy"])
    single = bench(report, options.rounds, bigram=False)
    bench(report, options.rounds, bigram=True)
    text = "page_hashes of an int32 array / hashlib alone, at most 1.3 times its time"
    report.aims.append(Aim(text, 1 / 1.3, single.ratio("int32 array", LIMIT)))
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
