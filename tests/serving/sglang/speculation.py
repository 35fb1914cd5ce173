"""Speculative decoding over a store: the draft's pages come back with the target's, or neither does.

The draft is the first layers of the target, so it guesses well if its KV is right. The number of
tokens that the target accepts in a step then shows whether the draft found what it had stored. Triton's
interpreter runs the kernels of speculative decoding; nothing else of this project's tests needs Triton.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from serving.answers import Asked, Comparison
from serving.models import DRAFT, TARGET, checkpoint, prompt
from serving.record import note
from serving.sglang.conftest import PLUG_POINTS
from serving.sglang.server import (
    PAGE,
    VERSION,
    LinkedServer,
    SGLangServer,
    alone,
    ours,
    own_file,
)
from serving.stores import Store, opened

from hicache_storage.cli.operations.proofs import framed_page
from hicache_storage.page import Page
from hicache_storage.page_store.frame import Framing

ROOT = Path(__file__).parents[3]
TRITON = ROOT / ".venv-sglang-triton"
_LENGTHS = (81, 97)
_THRESHOLD = PAGE
"""SGLang looks for prompts from this length on: the interpreter is too slow for long ones."""


def speculating(kind: type[SGLangServer], directory: Path) -> SGLangServer:
    """Return a server whose draft model proposes three tokens in each step."""
    draft = f"--speculative-draft-model-path {checkpoint(DRAFT)} --attention-backend triton"
    fewer_programs = "--triton-attention-num-kv-splits 1"
    steps = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    return kind(
        directory,
        None,
        *f"--speculative-algorithm STANDALONE {draft} {fewer_programs} {steps}".split(),
        model=TARGET,
        tokens=2048,
        variables={"TRITON_INTERPRET": "1"},
        more_path=[TRITON],
    )


def ask_each(server: SGLangServer, asked: Asked) -> tuple[Comparison, list[float]]:
    """Ask one prompt after the other, with cold pools. Return the accept length of each, too."""
    server.settle()
    server.flush()
    server.accept_lengths.clear()
    return asked.again(server.ask, clients=1), list(server.accept_lengths)


def lose_draft_of_ours(store: Store) -> int:
    """Remove the draft's pages. Return their number."""
    with store.open() as storage:
        drafts = [space for space in storage.spaces() if "draft" in space.pool]
        return sum(storage.remove_space(space.id) for space in drafts)


def zero_draft_of_ours(store: Store) -> int:
    """Write zeros with right checksums in place of the draft's pages. Return their number."""
    pages = 0
    with store.open() as storage:
        for space in [space for space in storage.spaces() if "draft" in space.pool]:
            hashes = [page.page_hash for page in storage.scan(space)]
            zeros = [memoryview(bytearray(space.stored_nbytes)) for _ in hashes]
            framed = [framed_page(space, each) for each in zeros]
            Framing(space, checksum=True).write(framed, hashes)
            storage.batch_delete(space, hashes)
            pages += sum(storage.batch_set(space, hashes, [Page(each) for each in zeros]))
    return pages


def zero_draft_of_sglang(server: SGLangServer) -> int:
    """Overwrite the draft's pages in the files of SGLang's own backend. Return their number."""
    files = [path for path in server.own_directory.rglob("*.bin") if "draft" in path.name]
    for path in files:
        path.write_bytes(bytes(path.stat().st_size))
    return len(files)


@pytest.mark.long
@pytest.mark.parametrize("kind", PLUG_POINTS)
def test_a_draft_finds_its_pages(kind: type[SGLangServer], tmp_path: Path) -> None:
    if not TRITON.exists():
        pytest.skip(f"there is no {TRITON}: `make test-serving` makes it")
    with (
        alone(),
        speculating(kind, tmp_path / "server") as server,
        opened("file", tmp_path / "store") as store,
    ):
        asked = Asked.of(server.ask, [prompt(number, each) for number, each in enumerate(_LENGTHS)])
        alone_accepts = list(server.accept_lengths)
        assert min(alone_accepts) > 1, "the draft guesses nothing: its pages would not matter"
        attachment = ours(store.backend, store.config, prefetch_threshold=_THRESHOLD)
        server.attach(attachment)

        def look(backend: str, event: str) -> tuple[Comparison, list[float]]:
            seen, accepts = ask_each(server, asked)
            length = round(sum(accepts) / len(accepts), 3)
            event = f"{server.plug_point}a draft model: {event}"
            note(VERSION, backend, event, seen, accept_length=length)
            assert seen.is_equal
            return seen, accepts

        def check(event: str, cached_tokens: int) -> None:
            seen, accepts = look("file", event)
            assert seen.cached_tokens == cached_tokens
            assert accepts == alone_accepts

        check("computed", 0)
        check("the pools are emptied", asked.page_tokens(PAGE))
        server.settle()
        server.end()
        server.attached = attachment
        server.start()
        check("restarted", asked.page_tokens(PAGE))
        server.settle()
        assert lose_draft_of_ours(store)
        check("the draft's pages are lost", 0)

        # The control: pages of zeros, which no checksum tells from the draft's.
        server.settle()
        if kind is LinkedServer:
            backend, zeroed = "file", zero_draft_of_ours(store)
        else:
            backend = "SGLang's file"
            server.attach(own_file(prefetch_threshold=_THRESHOLD))
            ask_each(server, asked)
            server.settle()
            zeroed = zero_draft_of_sglang(server)
        assert zeroed
        seen, accepts = look(backend, "the draft's pages are zeroed")
        assert seen.cached_tokens == asked.page_tokens(PAGE)
        assert sum(accepts) < sum(alone_accepts)
