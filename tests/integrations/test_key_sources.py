"""Engines that differ in one source of their KV's bytes share no pages, and equal engines share all."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrations.lmcache import key_sources as lmcache
from integrations.sglang import key_sources as sglang
from integrations.vllm import key_sources as vllm
from key_sources import NOT_IN_THE_KEY, AdapterKeys, Pair, table

from hicache_storage.errors import ConfigError

ADAPTERS: list[AdapterKeys] = [sglang, vllm, lmcache]

each_adapter = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.NAME)
PAIRS = [
    pytest.param(adapter, pair, id=f"{adapter.NAME}-{source}-{number}")
    for adapter in ADAPTERS
    for source, pairs in adapter.SOURCES.items()
    for number, pair in enumerate(pairs)
]


@pytest.mark.parametrize(("adapter", "pair"), PAIRS)
def test_engines_that_differ_in_a_source_have_other_keys(
    adapter: AdapterKeys, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = adapter.keys(tmp_path / "one", monkeypatch, **pair.one)
    if pair.refused:
        with pytest.raises(ConfigError, match=pair.refused):
            adapter.keys(tmp_path / "other", monkeypatch, **pair.other)
        return
    other = adapter.keys(tmp_path / "other", monkeypatch, **pair.other)

    assert not [pool for pool in pair.pools or one if one[pool] in other.values()]


@each_adapter
def test_engines_that_differ_in_nothing_have_equal_keys(
    adapter: AdapterKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [dict(adapter.keys(tmp_path / name, monkeypatch)) for name in ("one", "other")]

    assert keys[0] == keys[1]
    assert len(set(keys[0].values())) == len(keys[0])


@each_adapter
def test_the_page_has_the_sources_of_every_adapter(adapter: AdapterKeys) -> None:
    cells = {row["source"]: row[adapter.NAME] for row in table()}

    assert set(cells) == set(adapter.SOURCES)
    not_in_the_key = {name for name, cell in cells.items() if cell.startswith(NOT_IN_THE_KEY)}
    assert not_in_the_key == {name for name, pairs in adapter.SOURCES.items() if not pairs}
