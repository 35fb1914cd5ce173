"""Inputs that a seed determines: the corpus of a target, then mutations of its inputs."""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fuzz.catalogue import Target

_CHANGES_BITS = 2
_MOST_NBYTES = 8192


def inputs(target: Target, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield the corpus of a target, then `count` mutations. Equal seeds give equal inputs."""
    corpus = target.corpus()
    yield from corpus
    yield from islice(_mutations(corpus, target.tokens, random.Random(seed)), count)


def first_finding(target: Target, count: int, seed: int = 0) -> tuple[int, bytes] | None:
    """Return the number and the input of the first finding among `inputs`, or None without a finding."""
    for number, data in enumerate(inputs(target, count, seed), start=1):
        try:
            target.check(data)
        except Exception:  # noqa: BLE001 - a finding is any exception
            return number, data
    return None


def _mutations(
    corpus: Sequence[bytes], tokens: Sequence[bytes], rng: random.Random
) -> Iterator[bytes]:
    """Yield mutations of the inputs of a corpus without end."""
    draw = rng.getrandbits  # quicker than `randrange`, with a bias that mutations may have
    while True:
        data = bytearray(corpus[draw(32) % len(corpus)])
        for _ in range(1 + draw(_CHANGES_BITS)):
            _change(data, corpus, tokens, draw)
        yield bytes(data[:_MOST_NBYTES])


def _change(
    data: bytearray, corpus: Sequence[bytes], tokens: Sequence[bytes], draw: Callable[[int], int]
) -> None:
    """Change some bytes in place: one of libFuzzer's simple mutations."""
    at = draw(32) % (len(data) + 1)
    kind = draw(16) % (7 if tokens else 6)
    if kind == 0:
        nbytes = 1 + draw(3)
        data[at:at] = draw(8 * nbytes).to_bytes(nbytes, "little")
    elif kind == 1:
        del data[at : at + 1 + draw(4)]
    elif kind == 2:
        other = corpus[draw(32) % len(corpus)]
        data[at:] = other[draw(32) % (len(other) + 1) :]
    elif kind == 3:
        data[at:at] = data[at : at + 1 + draw(4)]
    elif kind == 6:
        token = tokens[draw(16) % len(tokens)]
        data[at : at + (len(token) if draw(1) else 0)] = token
    elif at < len(data):
        data[at] = data[at] ^ (1 << draw(3)) if kind == 4 else draw(8)
