"""Measure what a store does to requests: real servers without a store, over the engine's own, over ours.

    python benchmarks/engine_serving.py vllm [--rounds N] [--json FILE] [--path DIRECTORY]

`make bench-serving` runs it for vLLM and for SGLang, each in its environment. The engine serves a small
model with random weights on the CPU. First, each store is filled by a server of its own; our linker for
SGLang and SGLang's HiCache share our stores. Then one server for each candidate starts, and they take
turns; meanwhile the others are stopped by SIGSTOP. In its turn a server answers prompts whose KV only
its store has (hits), then new ones, which it computes and stores (misses). Each prompt is asked once, so
a hit never comes from the engine's own memory. The second server without a store shows the noise.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # this directory has a module of vLLM's name

import random
import statistics
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from _harness import Parser, Report, Section, console, markdown_head, markdown_row, scratch
from serving.answers import CLIENTS, ask_all
from serving.models import Model, prompt
from serving.sglang import server as sglang
from serving.stores import opened
from serving.vllm import server as vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from serving.answers import Answer
    from serving.engine import EngineServer
    from serving.stores import Store

MEDIUM = Model("medium", seed=3, layers=6, hidden=512, heads=8, kv_heads=4, inner=1408)
"""12 KiB of KV a token."""
LENGTH = 1025
"""The tokens of a prompt: whole pages, and the last token, which an engine computes in any case."""
CPU_NBYTES = 256 << 20
"""vLLM's CPU tier. Without room for all prompts that are loaded at once, vLLM computes them."""
NO_STORE, NOISE = "no store", "no store, again"
LINKED = ", linker"
"""What follows the name of a store that SGLang uses without HiCache."""
KINDS = ("hits", "misses")
MEASURES = ("first token", "prompts/s", "token after token")
PROMPTS = {1: 4, CLIENTS: CLIENTS}
"""How many prompts a turn has with so many clients."""


class Workload(NamedTuple):
    """The prompts that a server is asked together."""

    kind: str
    clients: int

    def prompts(self, name: str, turn: int) -> Sequence[Sequence[int]]:
        """Return the prompts of a turn: hits are the same for all candidates."""
        whose = "" if self.kind == "hits" else name
        label = f"{self.kind} {self.clients} {whose} {turn}"
        seed = random.Random(label).randrange(1 << 40)
        return [prompt(seed + number, LENGTH) for number in range(PROMPTS[self.clients])]


WORKLOADS = [Workload(kind, clients) for kind in KINDS for clients in PROMPTS]
Seconds = dict[tuple[Workload, str], dict[str, list[float]]]
"""The times of each candidate in the order of the rounds, by workload and measure."""


def candidates(engine: str, place: Path, stack: ExitStack) -> dict[str, Callable[[], EngineServer]]:
    """Return how a server of each candidate is made. Redis runs until the stack ends."""
    ours = {name: stack.enter_context(opened(name, place / name)) for name in ("file", "redis")}
    if engine == "vllm":
        return _of_vllm(place, ours)
    return _of_sglang(place, ours)


def _of_vllm(place: Path, stores: dict[str, Store]) -> dict[str, Callable[[], EngineServer]]:
    configs = {
        NO_STORE: None,
        NOISE: None,
        "vLLM's fs": vllm.fs(place / "fs", CPU_NBYTES),
        **{
            f"our {name}": vllm.ours(name, store.config, CPU_NBYTES)
            for name, store in stores.items()
        },
    }

    def make(name: str) -> EngineServer:
        directory = place / f"server {time.monotonic_ns()}"
        return vllm.VLLMServer(directory, configs[name], model=MEDIUM, prefix_cache=True)

    return {name: partial(make, name) for name in configs}


def _of_sglang(place: Path, stores: dict[str, Store]) -> dict[str, Callable[[], EngineServer]]:
    ours = {f"our {name}": sglang.ours(name, store.config) for name, store in stores.items()}
    attachments = {
        NO_STORE: None,
        NOISE: None,
        "SGLang's file": sglang.own_file(),
        **ours,
        **{f"{name}{LINKED}": attached for name, attached in ours.items()},
    }

    def make(name: str) -> EngineServer:
        directory = place / f"server {time.monotonic_ns()}"
        own = place / "own"
        server = sglang.LinkedServer if name.endswith(LINKED) else sglang.SGLangServer
        return server(directory, attachments[name], model=MEDIUM, own_directory=own)

    return {name: partial(make, name) for name in attachments}


def answered(server: EngineServer, prompts: Sequence[Sequence[int]], clients: int) -> list[Answer]:
    """Return the answers, of which none may have failed."""
    answers = ask_all(server.ask, prompts, clients)
    for answer in answers:
        if answer.failed:
            raise RuntimeError(f"{answer.error}; the log: {server.log}")
    return answers


def fill(server: EngineServer, name: str, rounds: int) -> None:
    """Let a server compute and store the prompts of all hits."""
    for workload in WORKLOADS:
        if workload.kind == "hits":
            for turn in range(rounds + 1):
                answered(server, workload.prompts(name, turn), CLIENTS)
    server.settle()
    server.end()


def take_turn(server: EngineServer, name: str, turn: int, seconds: Seconds) -> None:
    """Ask a server all its prompts of one turn, and keep the times unless it is the first turn."""
    for workload in WORKLOADS:
        began_s = time.monotonic()
        answers = answered(server, workload.prompts(name, turn), workload.clients)
        taken_s = time.monotonic() - began_s
        _check(name, workload, answers)
        first_s = statistics.median(answer.first_token_s for answer in answers)
        each_s = statistics.median(
            (answer.total_s - answer.first_token_s) / (len(answer.tokens) - 1) for answer in answers
        )
        if turn:
            for measure, value_s in zip(MEASURES, (first_s, taken_s, each_s), strict=True):
                seconds.setdefault((workload, measure), {}).setdefault(name, []).append(value_s)
    server.settle()


def _check(name: str, workload: Workload, answers: Sequence[Answer]) -> None:
    cached = sum(answer.cached_tokens for answer in answers)
    of = len(answers) * (LENGTH - 1)
    wanted = of if workload.kind == "hits" and name not in (NO_STORE, NOISE) else 0
    if cached != wanted:
        raise RuntimeError(f"{name}: {cached} of {of} tokens of {workload} were cached")


def measure(engine: str, rounds: int, place: Path) -> Seconds:
    """Fill the stores, start a server for each candidate, and let them take turns."""
    seconds: Seconds = {}
    with ExitStack() as stack:
        make = candidates(engine, place, stack)
        for name in make:
            if name not in (NO_STORE, NOISE):
                console.print(f"filling {name}", style="dim")
                with make[name]() as server:
                    fill(server, name, rounds)
        servers = {name: stack.enter_context(_stopped(make[name]())) for name in make}
        for turn in range(rounds + 1):
            for name in random.Random(turn).sample(list(servers), len(servers)):
                console.print(f"round {turn}: {name}", style="dim")
                servers[name].resume()
                take_turn(servers[name], name, turn, seconds)
                servers[name].pause()
    return seconds


@contextmanager
def _stopped(server: EngineServer) -> Generator[EngineServer]:
    """Yield a server that runs only in its turns."""
    with server:
        server.pause()
        yield server


def summary(sections: Sequence[Section]) -> str:
    """Return a Markdown table of the speeds relative to no store: above 1 is faster."""
    names = [name for name in sorted(sections[0].seconds) if name != NO_STORE]
    rows = (
        [section.title, *(f"{section.ratio(name, NO_STORE):.2f}" for name in names)]
        for section in sections
    )
    return "\n".join([markdown_head(["", *names]), *map(markdown_row, rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each workload and measure, and all ratios in one."""
    parser = Parser(__doc__, rounds=5, path=True)
    parser.add_argument("engine", choices=["vllm", "sglang"])
    options = parser.parsed(arguments)
    with scratch(options.path) as place:
        version = vllm.VERSION if options.engine == "vllm" else sglang.VERSION
        report = Report.begin(place, facts={"engine": version})
        seconds = measure(options.engine, options.rounds, place)
    for (workload, name), times in seconds.items():
        clients = f"{workload.clients} client{'s' if workload.clients > 1 else ''}"
        work = PROMPTS[workload.clients] if name == "prompts/s" else 1
        unit = "prompts/s" if name == "prompts/s" else "1/s"
        title = f"{workload.kind}, {clients}: {name}"
        baselines = [each for each in times if not each.startswith(("our ", NOISE))]
        report.add(Section(title=title, unit=unit, work=work, seconds=times, baselines=baselines))
    console.print(summary(report.sections), markup=False, soft_wrap=True)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
