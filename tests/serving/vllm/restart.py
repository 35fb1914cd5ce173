"""A server is started again, and its prompts' KV comes from the store. Then every page is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.answers import Answer, Comparison, ask_all, compare
from serving.record import note
from serving.vllm.server import VERSION, VLLMServer, ours

Prompts = Sequence[Sequence[int]]


def damage(directory: Path) -> int:
    """Change a byte in every 4 KiB of every page. Return the number of pages."""
    pages = [
        path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 65536
    ]
    for path in pages:
        data = bytearray(path.read_bytes())
        data[8195:-8192:4096] = bytes(byte ^ 0x81 for byte in data[8195:-8192:4096])
        path.write_bytes(data)
    return len(pages)


def served(
    directory: Path, kv: dict[str, Any], prompts: Prompts, references: list[Answer]
) -> tuple[Comparison, int, dict[str, int]]:
    """Ask a new server. Return how it compares, the tokens it did not compute, and its pages."""
    with VLLMServer(directory, kv, "--shutdown-timeout", "10") as server:
        answers = ask_all(server.ask, prompts)
        server.settle()
        pages = server.pages()
        server.end()
        assert not server.regions()
    cached = sum(answer.cached_tokens for answer in answers)
    return compare(answers, references), cached, pages


def test_a_cold_server_takes_the_tokens_from_the_store(
    prompts: Prompts, references: list[Answer], stored_tokens: int, directory: Path, tmp_path: Path
) -> None:
    kv = ours("file", {"path": str(directory)})
    seen, cached, _ = served(tmp_path / "filling", kv, prompts, references)
    assert seen.is_equal
    assert not cached
    seen, cached, _ = served(tmp_path / "restarted", kv, prompts, references)
    note(VERSION, "file", "restart", seen, from_the_store=cached)
    assert seen.is_equal
    assert cached == stored_tokens

    damaged = damage(directory)
    seen, cached, pages = served(tmp_path / "damaged", kv, prompts, references)
    note(VERSION, "file", "every page is damaged", seen, pages=damaged, healed=pages["store:ok"])
    assert seen.is_equal
    assert pages["load:corrupt"] > 0
    seen, cached, _ = served(tmp_path / "healed", kv, prompts, references)
    assert seen.is_equal
    assert cached == stored_tokens


def test_wrong_bytes_are_seen(
    prompts: Prompts, references: list[Answer], directory: Path, tmp_path: Path
) -> None:
    """The control: without checksums damaged pages are loaded, and the answers differ."""
    kv = ours("file", {"path": str(directory)}, checksum="none")
    served(tmp_path / "filling", kv, prompts, references)
    damage(directory)
    seen, cached, _ = served(tmp_path / "damaged", kv, prompts, references)
    note(VERSION, "file", "damaged, without checksums", seen, from_the_store=cached)
    assert cached
    assert seen.different == seen.answers
