"""A thousand answers, while random bits of the pages below them flip.

seen, pages = ask_in_rounds(server, asked, store.damage)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from serving.answers import Answer, Asked, Comparison, ask_all, compare
from serving.engine import EngineServer

PROMPTS = 125
ROUNDS = 8
_SHARES = (0.02, 0.3)
"""From which to which share of the pages gets a flipped bit between two rounds."""


def ask_in_rounds(
    server: EngineServer, asked: Asked, damage: Callable[[float, int], int], rounds: int = ROUNDS
) -> tuple[Comparison, int]:
    """Ask all prompts in each round, by eight clients, and damage pages between two rounds.

    The prompts must be more than the engine's own pools hold, so that their KV comes from the store.

    Args:
        server: The server that is asked, over the store that is damaged.
        asked: The prompts.
        damage: Flips a random bit in a share of the pages, by a seed. Returns the number of these pages.
        rounds: How often all prompts are asked.

    Returns:
        How the answers of all rounds compare, and how many pages were damaged.
    """
    answers: list[Answer] = []
    pages = 0
    for number in range(rounds):
        if number:
            server.settle()
            pages += damage(random.Random(f"share {number}").uniform(*_SHARES), number)
        answers += ask_all(server.ask, asked.prompts)
    return compare(answers, [*asked.references] * rounds), pages


def flip_random_bits(paths: Sequence[Path], generator: random.Random) -> int:
    """Flip one bit in each of these files, of pages that another store keeps. Return their number."""
    for path in paths:
        with path.open("r+b") as file:
            place = generator.randrange(path.stat().st_size)
            file.seek(place)
            byte = file.read(1)[0] ^ 1 << generator.randrange(8)
            file.seek(place)
            file.write(bytes([byte]))
    return len(paths)
