"""A storm: processes share a store, and signals end them and its server at random moments.

In each turn two writers and a reader work for some milliseconds. In some turns SIGKILL then ends the
server, which starts again with its data. SIGKILL ends the writers and the reader one after the other,
and a fresh process reads all pages. What is judged:

- No process gets a wrong byte.
- A page that was accepted, and not deleted since, is found, unless the store may evict it.
- A page that was deleted, and not set since, is not found.
- A call that was cut off has happened or has not, for each of its pages.
- No call lasts longer than `timeout_s` plus a second where the store has a server.

The seed decides the calls and the moments. The kernel decides which of them meet, so two runs differ.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from storm.actors import PAGES, SPACES, Begin, End, Sight, check, read, write
from storm.worlds import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from storm.worlds import World

WRITERS = 2
_FORK = multiprocessing.get_context("fork")
_WORK_S = (0.002, 0.05)
"""The time for which processes work until a signal ends the first of them."""
_STARTS_KILLED = 0.1
"""The share of turns whose first signal may come while the processes start."""
_SERVER_KILLS = 0.2
_LIMIT_S = 60.0


class Process:
    """A forked process, and the messages that it has sent."""

    def __init__(self, body: Callable[..., None], *arguments: object) -> None:
        self._link, theirs = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(target=body, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.messages: list[object] = []

    def wait_for_message(self) -> None:
        """Wait until the process has sent something."""
        self._link.poll(_LIMIT_S)

    def receive(self) -> None:
        """Take in what has arrived."""
        with suppress(EOFError, OSError):
            while self._link.poll():
                self.messages.append(self._link.recv())

    def kill(self) -> list[object]:
        """End the process. Return all its messages."""
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
    """One store under kills."""

    def __init__(self, world: World, seed: int) -> None:
        self.figures: Counter[str] = Counter()
        self.findings: list[str] = []
        self._world = world
        self._chance = random.Random(seed)
        self._there: dict[tuple[int, int], bool | None] = dict.fromkeys(
            ((space, number) for space in range(len(SPACES)) for number in range(PAGES)), False
        )
        """Whether each page is there; None: a call was cut off."""

    def turn(self) -> None:
        """Let processes work, end them, and look at all pages."""
        chance, world = self._chance, self._world
        writers = [
            Process(write, world, chance.getrandbits(32), number, WRITERS)
            for number in range(WRITERS)
        ]
        reader = Process(read, world, chance.getrandbits(32))
        if chance.random() >= _STARTS_KILLED:
            for writer in writers:
                writer.wait_for_message()
        self._work([*writers, reader])
        if world.server is not None and chance.random() < _SERVER_KILLS:
            world.server.stop()
            world.server.start()
            self.figures["server kills"] += 1
            self._work([*writers, reader])
        chance.shuffle(writers)
        for writer in writers:
            self._follow(writer.kill())
            self._work([reader])
        self._judge(reader.kill())
        self.figures["process kills"] += len(writers) + 1
        self._judge(Process(check, world).result(), whole=True)

    def _work(self, processes: Sequence[Process]) -> None:
        until_s = time.monotonic() + self._chance.uniform(*_WORK_S)
        while time.monotonic() < until_s:
            for process in processes:
                process.receive()  # a full pipe would hold them up
            time.sleep(0.001)

    def _follow(self, messages: Sequence[object]) -> None:
        """Take in the calls of a writer."""
        begun: Begin | None = None
        for message in messages:
            if isinstance(message, Begin):
                begun = message
                self._settle(begun, None)
            elif isinstance(message, End) and begun is not None:
                self.figures["calls"] += 1
                self.figures["calls without an answer"] += message.answer is None
                if message.elapsed_s > TIMEOUT_S + 1 and self._world.server is not None:
                    self.findings.append(f"{begun.operation} took {message.elapsed_s:.1f} s")
                self._settle(begun, message.answer)

    def _settle(self, call: Begin, answer: Sequence[bool] | None) -> None:
        """Note what a call did. A page that was not accepted, or not deleted, may be there or not."""
        for place, number in enumerate(call.numbers):
            done = answer is not None and answer[place]
            self._there[call.space, number] = (call.operation == "batch_set") if done else None

    def _judge(self, sights: Sequence[object], *, whole: bool = False) -> None:
        """Judge what was read: the bytes, and in a look at all pages which of them are there."""
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
        if found and expected is False:
            self.findings.append(f"page {number} of key space {space} is there after its delete")
        if not found and expected and self._world.retains:
            self.findings.append(f"page {number} of key space {space} was accepted, and is lost")
        self._there[space, number] = found


def rage(world: World, *, kills: int, seed: int) -> Storm:
    """Kill as many processes and servers, or stop at the first finding."""
    storm = Storm(world, seed)
    while storm.figures["process kills"] + storm.figures["server kills"] < kills:
        storm.turn()
        if storm.findings:
            break
    return storm
