"""A storm: processes share a store, and something happens to them and to it at random moments.

In each turn two writers and a reader work for some milliseconds. In some turns the store is then hit
in one of the ways that it has: its server is killed or paused, the network is cut, or its disk is full
(`storm.hazards`). In some turns the wall clocks of the processes are stepped. SIGKILL ends the writers
and the reader one after the other, and a fresh process reads all pages. The storm checks:

- No process gets a wrong byte.
- A page that was accepted, and not deleted since, is found, unless the store may evict it.
- A page that was deleted, and not set since, is not found.
- A call that was cut off has happened or has not, for each of its pages.
- If the store has a server, no call lasts longer than `timeout_s` plus a second.
- No unpublished file stays behind.

The seed decides the calls and the moments. The kernel decides which of them coincide, so runs differ.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from storm.actors import PAGES, SPACES, Begin, End, Orders, Sight, check, read, write
from storm.progress import Progress
from storm.world import World

WRITERS = 2
_FORK = multiprocessing.get_context("fork")
_WORK_S = (0.002, 0.05)
"""How long processes work until a signal ends the first of them."""
_STARTS_KILLED = 0.1
"""The share of turns in which the first signal may come while the processes start."""
_HITS = 0.3
_STEPPED = 0.2
_LIMIT_S = 60.0


class Process:
    """A forked process, and the messages that it has sent."""

    def __init__(self, body: Callable[..., None], *arguments: object) -> None:
        self._link, theirs = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=body, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.messages: list[object] = []
        self.ended_s = 0.0
        """When a signal ended the process."""

    def wait_for_message(self) -> None:
        """Wait until the process has sent something."""
        self._link.poll(_LIMIT_S)

    def receive(self) -> None:
        """Take in the messages that have arrived."""
        with suppress(EOFError, OSError):
            while self._link.poll():
                self.messages.append(self._link.recv())

    def kill(self) -> list[object]:
        """End the process. Return all its messages."""
        self.ended_s = time.monotonic()
        self._process.kill()
        self._process.join(_LIMIT_S)
        self.receive()
        self._link.close()
        return self.messages

    def result(self) -> list[object]:
        """Wait until the process ends by itself. Return all its messages."""
        until_s = time.monotonic() + _LIMIT_S
        while self._process.exitcode is None and time.monotonic() < until_s:
            self.receive()
            self._process.join(0.001)
        code = self._process.exitcode
        messages = self.kill()
        if code != 0:
            raise RuntimeError(f"a process that reads all pages has ended with {code}")
        return messages


class Storm:
    """One store in a storm."""

    def __init__(
        self,
        world: World,
        progress: Progress,
        *,
        hits: float = _HITS,
        stepped: float = _STEPPED,
    ) -> None:
        """Begin a storm, or continue one over an empty store.

        Args:
            world: The store.
            progress: The seed, which decides the calls and the moments, and the turns so far.
            hits: The share of turns in which the store is hit.
            stepped: The share of turns in which clocks are stepped.
        """
        self.figures = progress.figures
        self.findings = progress.findings
        self._world = world
        self._progress = progress
        self._hits = hits
        self._stepped = stepped
        self._chance = random.Random()
        self._there: dict[tuple[int, int], bool | None] = dict.fromkeys(
            ((space, number) for space in range(len(SPACES)) for number in range(PAGES)), False
        )
        """Whether each page is there. None: a call was cut off."""
        self._lingering: set[tuple[int, int]] = set()
        """The pages of sets in this turn that may take effect after later calls."""

    @property
    def kills(self) -> int:
        """How many processes and servers SIGKILL has ended."""
        return self.figures["process kills"] + self.figures["kill"]

    def turn(self) -> None:
        """Let processes work, hit the store, end the processes, and check all pages."""
        self.figures["turns"] += 1
        turn = f"{self._progress.seed}/{self.figures['turns']}"
        chance = self._chance = random.Random(turn)
        self._lingering.clear()
        writers, reader = self._started()
        self._work([*writers, reader])
        if self._world.hazards and chance.random() < self._hits:
            self._hit([*writers, reader])
        chance.shuffle(writers)
        for writer in writers:
            self._end(writer)
            self._work([reader])
        self._end(reader)
        self._world.settle()
        self._judge_sights(Process(check, self._world).result(), whole=True)
        self.findings += [f"{path} was left behind" for path in self._world.strays()]
        self._progress.save()

    def _started(self) -> tuple[list[Process], Process]:
        """Return writers and a reader. A signal may come while they start."""
        chance, steps = self._chance, self._chance.random() < self._stepped
        self.figures["turns with stepped clocks"] += steps
        orders = [Orders(chance.getrandbits(32), steps) for _ in range(WRITERS + 1)]
        writers = [
            Process(write, self._world, orders[number], number, WRITERS)
            for number in range(WRITERS)
        ]
        reader = Process(read, self._world, orders[WRITERS])
        if chance.random() >= _STARTS_KILLED:
            for writer in writers:
                writer.wait_for_message()
        return writers, reader

    def _hit(self, processes: Sequence[Process]) -> None:
        hazard = self._chance.choice(self._world.hazards)
        hazard.strike(self._chance, partial(self._work_for, processes))
        self.figures[type(hazard).__name__.lower()] += 1
        self._work(processes)

    def _work(self, processes: Sequence[Process]) -> None:
        self._work_for(processes, self._chance.uniform(*_WORK_S))

    def _work_for(self, processes: Sequence[Process], length_s: float) -> None:
        until_s = time.monotonic() + length_s
        while time.monotonic() < until_s:
            for process in processes:
                process.receive()  # a full pipe would hold them up
            time.sleep(0.001)

    def _end(self, process: Process) -> None:
        """Kill a process, and judge its calls."""
        messages = process.kill()
        self.figures["process kills"] += 1
        begun: Begin | None = None
        for message in messages:
            if isinstance(message, Begin):
                begun = message
                self._settle(begun, None)
            elif isinstance(message, End) and begun is not None:
                self.figures["calls"] += 1
                self.figures["calls without an answer"] += message.answer is None
                self._judge_length(begun, message.elapsed_s)
                self._settle(begun, message.answer)
                if message.answer is None and self._world.lingers:
                    self._lingering |= {(begun.space, number) for number in begun.numbers}
                begun = None
        if begun is not None:
            self._judge_length(begun, process.ended_s - begun.began_s)
        self._judge_sights([message for message in messages if isinstance(message, Sight)])

    def _settle(self, call: Begin, answer: Sequence[bool] | None) -> None:
        """Record what a call did. A page that was not accepted, or not deleted, may be there or not."""
        if call.operation == "batch_get":
            return
        if call.operation == "batch_set" and answer is not None:
            self.figures["pages accepted"] += sum(answer)
            self.figures["pages refused"] += len(answer) - sum(answer)
        for place, number in enumerate(call.numbers):
            done = answer is not None and answer[place]
            done = done and (call.space, number) not in self._lingering
            self._there[call.space, number] = (call.operation == "batch_set") if done else None

    def _judge_length(self, call: Begin, elapsed_s: float) -> None:
        limit_s = self._world.limit_s
        if limit_s is not None and elapsed_s > limit_s:
            self.findings.append(f"{call.operation} took {elapsed_s:.1f} s")

    def _judge_sights(self, sights: Sequence[object], *, whole: bool = False) -> None:
        """Judge what was read: the bytes and, if all pages were checked, which of them are there."""
        for sight in sights:
            assert isinstance(sight, Sight)
            self.figures["pages read"] += len(sight.found)
            self.findings += [
                f"page {number} of key space {sight.space} has wrong bytes"
                for number in sight.wrong
            ]
            for number in sight.asked if whole else ():
                self._judge_presence(sight.space, number, found=number in sight.found)

    def _judge_presence(self, space: int, number: int, *, found: bool) -> None:
        expected = self._there[space, number]
        if found and expected is False and self._world.keeps_deletions:
            self.findings.append(f"page {number} of key space {space} is there after its delete")
        if not found and expected and self._world.retains:
            self.findings.append(f"page {number} of key space {space} was accepted, and is lost")
        self._there[space, number] = found


def rage(world: World, *, kills: int, seed: int, **shares: float) -> Storm:
    """Kill this many processes and servers, or stop at the first finding."""
    return go_on(world, Progress(seed), kills=kills, **shares)


def go_on(world: World, progress: Progress, *, kills: int, **shares: float) -> Storm:
    """Take turns until this many processes and servers are killed, or to the first finding."""
    storm = Storm(world, progress, **shares)
    while storm.kills < kills and not storm.findings:
        storm.turn()
    return storm
