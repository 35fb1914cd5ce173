"""Inputs that a seed determines: those of a target's corpus, then mutations of them."""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fuzz.catalogue import Target

_MOST_CHANGES = 4
_MOST_NBYTES = 8192


def inputs(target: Target, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield the corpus of a target, then `count` mutations. Equal seeds give equal inputs."""
    corpus = target.corpus()
    yield from corpus
    yield from islice(_mutations(corpus, target.tokens, random.Random(seed)), count)


def first_finding(target: Target, count: int, seed: int = 0) -> tuple[int, bytes] | None:
    """Return the number and the input of the first finding among `inputs`; None if there is none."""
    for number, data in enumerate(inputs(target, count, seed), start=1):
        try:
            target.check(data)
        except Exception:  # noqa: BLE001 - a finding is any exception
            return number, data
    return None


def _mutations(
    corpus: Sequence[bytes], tokens: Sequence[bytes], rng: random.Random
) -> Iterator[bytes]:
    while True:
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randint(1, _MOST_CHANGES)):
            _change(data, corpus, tokens, rng)
        yield bytes(data[:_MOST_NBYTES])


def _change(
    data: bytearray, corpus: Sequence[bytes], tokens: Sequence[bytes], rng: random.Random
) -> None:
    """Change some bytes in place: one of libFuzzer's simple mutations."""
    at = rng.randint(0, len(data))
    kind = rng.randrange(7 if tokens else 6)
    if kind == 0:
        data[at:at] = rng.randbytes(rng.randint(1, 8))
    elif kind == 1:
        del data[at : at + rng.randint(1, 16)]
    elif kind == 2:
        other = rng.choice(corpus)
        start = rng.randint(0, len(other))
        data[at:] = other[start:]
    elif kind == 3:
        data[at:at] = data[at : at + rng.randint(1, 16)]
    elif kind == 6:
        token = rng.choice(tokens)
        data[at : at + rng.choice((0, len(token)))] = token
    elif at < len(data):
        data[at] = data[at] ^ (1 << rng.randrange(8)) if kind == 4 else rng.randrange(256)
