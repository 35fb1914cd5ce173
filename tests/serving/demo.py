"""What `make demo-vllm` and `make demo-sglang` show: a real engine, cold, warm, restarted, over damage.

An engine's module builds a `Demo` and calls `run`. Two stores are filled with the same prompts: ours,
and the store that comes with the engine. After a restart both give back the KV of one half of the
prompts. Then one bit of every stored page is flipped, and the engine is asked the other half.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from serving.answers import Answer, compare
from serving.engine import EngineServer
from serving.record import NOTES, PAGE, markdown, replace_part

from hicache_storage.text_tables import text_table

Store = Literal["ours", "own"]
OURS: Final = "ours"
OWN: Final = "own"
STORES: Sequence[Store] = (OURS, OWN)
TITLES = ("phase", "first token", "of cold", "from the cache", "wrong answers")
_ENDS = 8  # how many tokens of an answer are printed


@dataclass(frozen=True, kw_only=True)
class Demo:
    """One engine with its own store and ours."""

    name: str
    """What its table is called in the page of the demos."""
    engine: str
    """Its name and version."""
    stores: dict[Store, str]
    """What the two stores are called in the table."""
    prompts: Sequence[Sequence[int]]
    """An even number of prompts."""
    warm_up: Sequence[int]
    """A prompt that each server answers first, so that no later one pays for what is loaded lazily."""
    serve: Callable[[Store], AbstractContextManager[EngineServer]]
    """Starts a server over one of the two stores. Leaving the context ends it as an operator does."""
    damage: Callable[[Store], int]
    """Flips one bit in every page of a store. Returns how many pages it changed."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The answers to all prompts in one phase."""

    name: str
    first_token_s: float
    of_cold: float
    cached_tokens: int
    prompt_tokens: int
    wrong: int
    answers: int
    begins: list[int] = field(default_factory=list[int])
    """How the last answer begins."""

    def row(self) -> Sequence[str]:
        """Return the cells of the table."""
        return (
            self.name,
            f"{self.first_token_s:.2f} s",
            f"{self.of_cold:.2f}",
            f"{self.cached_tokens:,} of {self.prompt_tokens:,}",
            f"{self.wrong} of {self.answers}",
        )


def run(demo: Demo) -> int:
    """Run all phases, print the table, and keep it. Return 0 if ours was right in each phase."""
    phases = list(_Phases(demo).run())
    table = text_table(TITLES, (phase.row() for phase in phases), "lrrrr")
    _say(f"\n{demo.engine}, {len(demo.prompts)} prompts; medians\n")
    _print(table)
    computed, *damaged = (
        next(phase for phase in phases if phase.name.endswith(name))
        for name in ("computed", *(f"{demo.stores[store]}, damaged" for store in STORES))
    )
    for phase in (computed, *damaged):
        _say(f"{phase.name + ':':32} {' '.join(map(str, phase.begins))} ...\n")
    NOTES.mkdir(parents=True, exist_ok=True)
    shown = [asdict(phase) for phase in phases]
    kept = {"name": demo.name, "engine": demo.engine, "phases": shown}
    path = NOTES / f"demo-{demo.name.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n")
    ours = [phase for phase in phases if demo.stores[OURS] in phase.name]
    wrong = sum(phase.wrong for phase in ours)
    lost = [phase.name for phase in ours if "restarted" in phase.name and not phase.cached_tokens]
    if wrong or lost:
        _say(f"not as it should be: {wrong} wrong answers; nothing from the cache in {lost}\n")
    return int(bool(wrong or lost))


class _Phases:
    """Runs the phases one after the other, each compared with the answers that were computed."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._references: list[Answer] = []

    def run(self) -> list[Phase]:
        demo = self._demo
        phases: list[Phase] = []
        ours, own = (demo.stores[store] for store in STORES)
        every = range(len(demo.prompts))
        one_half, other_half = every[: len(every) // 2], every[len(every) // 2 :]
        with self._serving(OURS) as server:
            phases.append(self._ask(server, f"{ours}, empty: computed", every))
            server.settle()
            phases.append(self._ask(server, f"{ours}, warm", one_half))
        with self._serving(OWN) as server:
            phases.append(self._ask(server, f"{own}, empty", every))
            server.settle()
        damaged: list[Phase] = []
        for store in STORES:
            name = demo.stores[store]
            with self._serving(store) as server:
                phases.append(self._ask(server, f"{name}, restarted", one_half))
                server.settle()
                _say(f"one bit flipped in each of {demo.damage(store):,} pages of {name}\n")
                damaged.append(self._ask(server, f"{name}, damaged", other_half))
        return [*phases, *damaged]

    @contextmanager
    def _serving(self, store: Store) -> Generator[EngineServer]:
        _say(f"starting {self._demo.engine} over {self._demo.stores[store]}\n")
        with self._demo.serve(store) as server:
            server.ask(self._demo.warm_up)
            yield server

    def _ask(self, server: EngineServer, name: str, numbers: Sequence[int]) -> Phase:
        prompts = [self._demo.prompts[number] for number in numbers]
        answers = [server.ask(prompt) for prompt in prompts]
        for answer in answers:
            if answer.failed:
                raise RuntimeError(f"{name}: {answer.error}; the log: {server.log}")
        self._references = self._references or answers
        references = [self._references[number] for number in numbers]
        first_token_s = statistics.median(answer.first_token_s for answer in answers)
        cold_s = statistics.median(answer.first_token_s for answer in self._references)
        phase = Phase(
            name=name,
            first_token_s=first_token_s,
            of_cold=first_token_s / cold_s,
            cached_tokens=sum(answer.cached_tokens for answer in answers),
            prompt_tokens=sum(map(len, prompts)),
            wrong=compare(answers, references).different,
            answers=len(answers),
            begins=answers[-1].tokens[:_ENDS],
        )
        _say(f"  {name}: first token after {phase.first_token_s:.2f} s\n")
        return phase


def write_tables() -> None:
    """Write the tables of the demos that ran last into `docs/serving.md`."""
    text = PAGE.read_text(encoding="utf-8")
    for path in sorted(NOTES.glob("demo-*.json")):
        kept = json.loads(path.read_text())
        table = markdown(TITLES, (Phase(**phase).row() for phase in kept["phases"]))
        text = replace_part(text, f"demo {kept['name']}", f"{kept['engine']}:\n\n{table}")
    PAGE.write_text(text, encoding="utf-8")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print(table: object) -> None:
    from rich.console import Console

    Console(width=100).print(table)


if __name__ == "__main__":
    write_tables()
