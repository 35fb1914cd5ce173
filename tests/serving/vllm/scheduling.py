"""Whatever vLLM does with a request, its answer is the same as without a store.

Two servers share a store, prompts are computed in chunks, requests are preempted out of a tiny pool,
models have sliding windows, adapters and drafts, and servers end while they write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from serving.answers import Asked, Comparison, compare
from serving.models import DRAFT, TARGET, TINY, WINDOW, checkpoint, lora
from serving.record import note
from serving.stores import opened
from serving.vllm.conftest import ENDING, ask_cold, prompts
from serving.vllm.device import ZERO_DRAFT
from serving.vllm.server import CHUNK, VERSION, VLLMServer, ours

_LARGE_CPU_NBYTES = 64 << 20


def loaded_after_computed(server: VLLMServer, asked: Asked) -> Comparison:
    """Compute the answers over an empty store, and return those that follow with empty levels."""
    seen = asked.again(server.ask)
    assert seen.is_equal, seen
    assert not seen.cached_tokens, seen
    return ask_cold(server, asked)


def ask_both(servers: Sequence[VLLMServer], *asked: Asked) -> list[Comparison]:
    """Ask two servers at the same time, each its own prompts. Return when both have stored all pages."""

    def ask(number: int) -> Comparison:
        return asked[number].again(servers[number].ask)

    with ThreadPoolExecutor(len(servers)) as executor:
        seen = list(executor.map(ask, range(len(servers))))
    for server in servers:
        server.settle()
    return seen


@pytest.mark.long
def test_two_servers_share_a_store(reference: VLLMServer, tmp_path: Path) -> None:
    """One of them runs without this project's compiled module."""
    first, second, both = (Asked.of(reference.ask, prompts(number)) for number in (0, 8, 16))
    with opened("file", tmp_path) as store, ExitStack() as stack:
        kv = ours(store.backend, store.config)
        servers = (
            VLLMServer(tmp_path / "compiled", kv, *ENDING),
            VLLMServer(tmp_path / "python", kv, *ENDING, variables={"HICACHE_NATIVE": "0"}),
        )
        for server in servers:
            server.launch()
            stack.callback(server.stop)
        for server in servers:
            server.wait_until_ready()

        for seen in ask_both(servers, first, second):
            assert seen.is_equal, seen
            assert not seen.cached_tokens, seen
        for seen, origin in zip(
            ask_both(servers, second, first),
            ("a server with HICACHE_NATIVE=0", "another server"),
            strict=True,
        ):
            note(VERSION, "file", f"pages of {origin}", seen)
            assert seen.is_equal, seen
            assert seen.cached_tokens == first.page_tokens(CHUNK), seen
        for seen in ask_both(servers, both, both):
            note(VERSION, "file", "two servers write the same pages at once", seen)
            assert seen.is_equal, seen


@pytest.mark.long
def test_prompts_computed_in_chunks(asked: Asked, tmp_path: Path) -> None:
    options = ("--max-num-batched-tokens", "100", "--max-num-seqs", "8")
    with (
        opened("file", tmp_path) as store,
        VLLMServer(tmp_path / "server", ours(store.backend, store.config), *options) as server,
    ):
        seen = loaded_after_computed(server, asked)
        note(VERSION, "file", "at most 100 tokens are computed in a step", seen)
        assert seen.is_equal, seen
        assert seen.cached_tokens == asked.page_tokens(CHUNK), seen


@pytest.mark.long
def test_preemption(reference: VLLMServer, tmp_path: Path) -> None:
    """Three prompts fit into the KV pool, but not with their answers."""
    answer_tokens = 120
    asked = Asked.of(partial(reference.ask, tokens=answer_tokens), prompts())
    options = ("--max-model-len", "1024", "--num-gpu-blocks-override", "64")
    with (
        opened("file", tmp_path) as store,
        VLLMServer(tmp_path / "server", ours(store.backend, store.config), *options) as server,
    ):
        ask = partial(server.ask, tokens=answer_tokens)
        before = 0.0
        for event in ("preempted while they are computed", "preempted after they were loaded"):
            seen = asked.again(ask)
            server.flush()
            preempted = server.total("vllm:num_preemptions_total")
            note(VERSION, "file", f"requests are {event}", seen, preempted=int(preempted - before))
            assert seen.is_equal, seen
            assert preempted > before
            before = preempted
        assert seen.cached_tokens >= asked.page_tokens(CHUNK), seen


@pytest.mark.long
def test_a_sliding_window(tmp_path: Path) -> None:
    with VLLMServer(tmp_path / "reference", model=WINDOW) as server:
        asked = Asked.of(server.ask, prompts())
    with opened("file", tmp_path) as store:
        kv = ours(store.backend, store.config, 2 * 16 << 20)
        with VLLMServer(tmp_path / "server", kv, model=WINDOW) as server:
            seen = loaded_after_computed(server, asked)
            note(VERSION, "file", "a model with sliding windows", seen)
            assert seen.is_equal, seen
            assert seen.cached_tokens == asked.page_tokens(CHUNK), seen


@pytest.mark.long
def test_adapters_of_lora(tmp_path: Path) -> None:
    """A prompt has other KV with an adapter, and neither is taken for the other."""
    adapter = "a"
    options = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{adapter}={lora(TINY)}")
    with VLLMServer(tmp_path / "reference", None, *options) as server:
        plain = Asked.of(server.ask, prompts())
        adapted = Asked.of(partial(server.ask, model=adapter), prompts())
    assert compare(plain.references, adapted.references).different == len(plain.prompts)
    with (
        opened("file", tmp_path) as store,
        VLLMServer(tmp_path / "server", ours(store.backend, store.config), *options) as server,
    ):
        with_adapter = partial(server.ask, model=adapter)
        assert plain.again(server.ask).is_equal
        seen = adapted.again(with_adapter)
        note(VERSION, "file", "an adapter after the plain model", seen)
        assert seen.is_equal, seen
        assert not seen.cached_tokens, seen
        server.flush()
        for asked, ask, which in ((plain, server.ask, "without"), (adapted, with_adapter, "with")):
            seen = asked.again(ask)
            note(VERSION, "file", f"loaded {which} an adapter", seen)
            assert seen.is_equal, seen
            assert seen.cached_tokens == asked.page_tokens(CHUNK), seen


class Speculating:
    """Servers of TARGET with a draft model. Prompts are asked one at a time."""

    _DRAFTED = 3

    def __init__(self, directory: Path, store_config: dict[str, object]) -> None:
        self._directory = directory
        self._kv = ours("file", store_config, _LARGE_CPU_NBYTES)

    def server(self, name: str, **variables: str) -> VLLMServer:
        draft = {"model": str(checkpoint(DRAFT)), "method": "draft_model"}
        speculation = json.dumps({**draft, "num_speculative_tokens": self._DRAFTED})
        return VLLMServer(
            self._directory / name,
            None if name == "reference" else self._kv,
            *("--speculative-config", speculation, *ENDING),
            model=TARGET,
            variables=variables,
        )

    @staticmethod
    def accepted(server: VLLMServer) -> int:
        """Return how many drafted tokens were accepted so far."""
        server.settle()
        return int(server.total("vllm:spec_decode_num_accepted_tokens_total"))


@pytest.mark.long
def test_the_draft_of_speculative_decoding(tmp_path: Path) -> None:
    """The draft's KV comes back with that of its target: as many tokens are accepted as before."""
    with opened("file", tmp_path) as store:
        speculating = Speculating(tmp_path, store.config)
        with speculating.server("reference") as server:
            asked = Asked.of(server.ask, prompts())
            computed = speculating.accepted(server)
        with speculating.server("filling") as server:
            assert asked.again(server.ask, clients=1).is_equal
            server.settle()
            server.end()
        accepted: list[int] = []
        for name, event, variables in (
            ("restarted", "restart with a draft model", {}),
            ("zeroed", "the same with the draft's KV zeroed", {ZERO_DRAFT: "1"}),
        ):
            with speculating.server(name, **variables) as server:
                seen = asked.again(server.ask, clients=1)
                accepted.append(speculating.accepted(server))
            note(VERSION, "file", event, seen, accepted_drafts=accepted[-1], computed=computed)
            assert seen.is_equal, seen
            assert seen.cached_tokens == asked.page_tokens(CHUNK), seen
    loaded, zeroed = accepted
    assert computed
    assert loaded == computed
    assert zeroed < computed / 4


@pytest.mark.long
def test_sigterm_with_a_timeout(asked: Asked, tmp_path: Path) -> None:
    """What was computed is written before the server has ended, and its shared memory is removed."""
    with opened("file", tmp_path) as store:
        kv = ours(store.backend, store.config)
        with VLLMServer(tmp_path / "server", kv, *ENDING) as server:
            seen = asked.again(server.ask)
            took_s = server.end()
        pages = store.pages()
    facts = {"pages": pages, "ended_after_s": round(took_s, 1)}
    note(VERSION, "file", "SIGTERM with --shutdown-timeout 10", seen, **facts)
    assert seen.is_equal, seen
    assert pages * CHUNK == asked.page_tokens(CHUNK)
    assert not server.left


@pytest.mark.long
def test_sigterm_without_a_timeout(asked: Asked, tmp_path: Path) -> None:
    """vLLM does not wait for its engine. The pages that are there by then are right."""
    with opened("file", tmp_path) as store:
        kv = ours(store.backend, store.config)
        with VLLMServer(tmp_path / "server", kv) as killed:
            seen = asked.again(killed.ask)
            assert seen.is_equal, seen
            took_s = killed.end()
        pages = store.pages()
        with VLLMServer(tmp_path / "restarted", kv, *ENDING) as server:
            seen = asked.again(server.ask)
    facts = {"pages": pages, "ended_after_s": round(took_s, 1), "left_in_shm": len(killed.left)}
    note(VERSION, "file", "SIGTERM without --shutdown-timeout, then a restart", seen, **facts)
    assert seen.is_equal, seen
    assert seen.cached_tokens <= pages * CHUNK
