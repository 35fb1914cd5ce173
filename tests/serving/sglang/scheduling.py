"""Whatever SGLang does with a request, its answer is the same as without a store.

Two servers share a store, prompts are computed in chunks, requests are retracted out of a tiny pool,
host memory has each of its layouts, prefetches follow each policy, and a storage is detached.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from servers import wait_until
from serving.answers import Answer, Asked, Comparison
from serving.models import WINDOW, prompt
from serving.record import note
from serving.sglang.conftest import ask_cold
from serving.sglang.server import LAYOUTS, PAGE, VERSION, SGLangServer, alone, ours
from serving.stores import Store, opened

_PROMPTS = 8
_LENGTH = 600
_SMALL_NBYTES = 1 << 16
"""SGLang leaves a table of its load and a semaphore in /dev/shm."""


def prompts(first: int, length: int = _LENGTH) -> Sequence[Sequence[int]]:
    """Return eight prompts from this number on."""
    return [prompt(first + number, length) for number in range(_PROMPTS)]


@contextmanager
def attached(server: SGLangServer, directory: Path, **fields: Any) -> Generator[Store]:
    """Attach an empty `file` store to a server with cold pools, and detach it."""
    server.detach()
    server.flush()
    with opened("file", directory) as store:
        server.attach(ours(store.backend, store.config, **fields))
        yield store
        server.settle()
        server.detach()


def loaded_after_computed(server: SGLangServer, asked: Asked) -> Comparison:
    """Compute the answers over an empty store, and return those that follow with cold pools."""
    seen = ask_cold(server, asked)
    assert seen.is_equal, seen
    assert not seen.cached_tokens, seen
    return ask_cold(server, asked)


@pytest.mark.long
def test_the_shared_server_takes_no_time_of_another(server: SGLangServer) -> None:
    def state() -> str:
        return Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0]

    with alone():
        wait_until(lambda: state() == "T")
    wait_until(lambda: state() != "T")


@pytest.mark.long
def test_two_servers_share_a_store(server: SGLangServer, asked: Asked, tmp_path: Path) -> None:
    fresh = Asked.of(server.ask, prompts(100))
    with attached(server, tmp_path / "store") as store:
        attachment = ours(store.backend, store.config)
        with SGLangServer(tmp_path / "other", attachment) as other:
            assert ask_cold(server, asked).is_equal
            server.settle()
            seen = asked.again(other.ask)
            note(VERSION, "file", "a second server reads what the first one wrote", seen)
            assert seen.is_equal
            assert seen.cached_tokens == asked.page_tokens(PAGE)

            both = (server, other)

            def ask_both() -> list[Comparison]:
                with ThreadPoolExecutor(len(both)) as executor:
                    return list(executor.map(ask_fresh, both))

            def ask_fresh(each: SGLangServer) -> Comparison:
                return fresh.again(each.ask)

            written = ask_both()
            for each in both:
                each.settle()
                each.flush()
            read = ask_both()
            note(VERSION, "file", "both write the same pages at once", read[0])
            assert all(seen.is_equal for seen in (*written, *read))
            assert [seen.cached_tokens for seen in read] == [fresh.page_tokens(PAGE)] * len(both)


@pytest.mark.long
def test_a_tiny_pool(tmp_path: Path) -> None:
    """Prompts are computed in chunks, and running requests lose their place in the pool."""
    answer_tokens = 120
    with (
        alone(),
        SGLangServer(
            tmp_path / "server",
            None,
            *("--schedule-conservativeness", "0.1"),
            tokens=1536,
            ratio=4,
            chunk=128,
            variables={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
        ) as server,
    ):

        def ask(tokens: Sequence[int]) -> Answer:
            return server.ask(tokens, answer_tokens)

        asked = Asked.of(ask, prompts(0, 300))
        with attached(server, tmp_path / "store"):
            for event in ("chunked and retracted", "chunked, retracted, and loaded"):
                server.settle()
                server.flush()
                before = server.total("num_retracted_requests_total")
                seen = asked.again(ask)
                retracted = server.total("num_retracted_requests_total") - before
                note(VERSION, "file", event, seen, retracted_requests=int(retracted))
                assert seen.is_equal
                assert retracted
            assert seen.cached_tokens >= asked.page_tokens(PAGE)

            # SGLang gives up a prefetch as soon as it considers a request: only a waiting one has time.
            server.settle()
            server.detach()
            server.attach(ours("file", {"path": str(tmp_path / "store/pages")}), "best_effort")
            server.flush()
            seen = asked.again(ask)
            note(VERSION, "file", "best_effort, requests wait for a place in the pool", seen)
            assert seen.is_equal
            assert seen.cached_tokens


@pytest.mark.long
@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort"])
def test_a_prefetch_policy(policy: str, server: SGLangServer, asked: Asked, tmp_path: Path) -> None:
    with attached(server, tmp_path) as store:
        ask_cold(server, asked)
        server.settle()
        server.detach()
        server.attach(ours(store.backend, store.config), policy)
        server.flush()
        seen = asked.again(server.ask, clients=1)
        note(VERSION, "file", f"{policy}, one request at a time", seen)
        assert seen.is_equal
        assert seen.cached_tokens == (0 if policy == "best_effort" else asked.page_tokens(PAGE))


@pytest.mark.long
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_layout(layout: str, tmp_path: Path) -> None:
    with alone(), SGLangServer(tmp_path / "server", layout=layout) as server:
        asked = Asked.of(server.ask, prompts(0))
        with attached(server, tmp_path / "store"):
            seen = loaded_after_computed(server, asked)
            note(VERSION, "file", f"layout {layout}", seen)
            assert seen.is_equal
            assert seen.cached_tokens == asked.page_tokens(PAGE)


@pytest.mark.long
def test_without_the_compiled_module(asked: Asked, tmp_path: Path) -> None:
    with (
        alone(),
        opened("file", tmp_path / "store") as store,
        SGLangServer(
            tmp_path / "server",
            ours(store.backend, store.config),
            variables={"HICACHE_NATIVE": "0"},
        ) as server,
    ):
        seen = loaded_after_computed(server, asked)
        note(VERSION, "file", "HICACHE_NATIVE=0", seen)
        assert seen.is_equal
        assert seen.cached_tokens == asked.page_tokens(PAGE)


@pytest.mark.long
def test_a_sliding_window(tmp_path: Path) -> None:
    """On a CPU, SGLang keeps all KV of such a model in one pool, and attention masks what is too old."""
    with alone(), SGLangServer(tmp_path / "server", model=WINDOW) as server:
        asked = Asked.of(server.ask, prompts(0))
        with attached(server, tmp_path / "store"):
            seen = loaded_after_computed(server, asked)
            note(VERSION, "file", "a model with sliding windows", seen)
            assert seen.is_equal
            assert seen.cached_tokens


@pytest.mark.long
def test_attach_and_detach(server: SGLangServer, asked: Asked, tmp_path: Path) -> None:
    with (
        attached(server, tmp_path / "first") as first,
        opened("file", tmp_path / "second") as second,
    ):
        seen = loaded_after_computed(server, asked)
        assert seen.cached_tokens == asked.page_tokens(PAGE)

        def is_accepted() -> bool:  # not for an instant after the last answer
            status, text = server.try_attach(ours(second.backend, second.config))
            return status == HTTPStatus.OK and "policies updated" in text

        wait_until(is_accepted)  # SGLang's answer: it took over the policies alone
        assert not second.pages()
        assert ask_cold(server, asked).cached_tokens == asked.page_tokens(PAGE)
        assert not second.pages()

        with ThreadPoolExecutor(1) as executor:
            long = executor.submit(server.ask, asked.prompts[0], 200)
            wait_until(lambda: server.total("num_running_reqs") > 0, 30)
            status, text = server.call("DELETE", "/hicache/storage-backend")
            assert status == HTTPStatus.BAD_REQUEST, text
            assert not long.result().failed

        server.detach()
        pages = first.pages()
        server.flush()
        seen = asked.again(server.ask)
        note(VERSION, "file", "detached", seen)
        assert seen.is_equal
        assert not seen.cached_tokens
        assert first.pages() == pages

        status, text = server.try_attach(ours("file", {"path": str(tmp_path), "no_such": 1}))
        assert status == HTTPStatus.BAD_REQUEST
        assert "no_such" in text

        server.attach(ours(first.backend, first.config))
        seen = ask_cold(server, asked)
        note(VERSION, "file", "detached and attached again", seen)
        assert seen.is_equal
        assert seen.cached_tokens == asked.page_tokens(PAGE)


@pytest.mark.long
def test_the_end_of_a_server(tmp_path: Path) -> None:
    """A server ends while it writes pages: those that it reported as written are there, and right."""

    def end(server: SGLangServer, _: Store) -> float:
        return server.end()

    def kill(server: SGLangServer, _: Store) -> float:
        server.stop()
        return 0.0

    def end_without_store(server: SGLangServer, store: Store) -> float:
        store.pause()
        took_s = server.end()
        store.resume()
        return took_s

    ends: dict[str, tuple[str, Callable[[SGLangServer, Store], float]]] = {
        "SIGTERM right after the last answer": ("file", end),
        "SIGKILL right after the last answer": ("file", kill),
        "SIGTERM while its server is stopped": ("redis", end_without_store),
    }
    with alone(), SGLangServer(tmp_path / "server") as server:
        asked = Asked.of(server.ask, prompts(0))
        for number, (event, (name, end_it)) in enumerate(ends.items()):
            with opened(name, tmp_path / f"store{number}") as store:
                server.attached = ours(store.backend, store.config)
                server.attach(server.attached)
                server.flush()
                before = server.total("backuped_tokens_total")
                assert asked.again(server.ask).is_equal
                reported = int(server.total("backuped_tokens_total") - before) // PAGE
                took_s = end_it(server, store)
                pages = store.pages()
                server.start()
                seen = asked.again(server.ask)
                facts: dict[str, float] = {
                    "reported_pages": reported,
                    "written_pages": pages,
                    "ended_after_s": round(took_s, 1),
                    "bytes_left_in_shm": server.left_nbytes,
                }
                note(VERSION, store.backend, event, seen, **facts)
                assert seen.is_equal
                assert pages >= reported
                assert took_s < server.end_limit_s, "SIGTERM did not end it"
                assert server.left_nbytes < _SMALL_NBYTES, "a pool is left in /dev/shm"
                assert not server.pages().get("load:corrupt")
                assert seen.cached_tokens <= pages * PAGE
                server.settle()
