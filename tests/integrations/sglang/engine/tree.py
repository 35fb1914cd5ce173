"""A server's complete cache: device, host and a store, under SGLang's own radix tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang_engine import DRAFT, TOKENS
from sglang_radix import Server, as_flag, server_world


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_prefix_goes_through_all_tiers_into_a_cold_server(
    kind: str, config: dict[str, Any]
) -> None:
    with server_world(config), Server(kind) as warm, Server(kind) as cold:
        computed = warm.compute(TOKENS)
        assert cold.load_prefix(TOKENS) == (len(TOKENS), computed)


def test_target_and_draft_come_back_together(config: dict[str, Any]) -> None:
    with (
        server_world(config, speculative_draft_model_path="org/draft"),
        Server(draft=DRAFT) as warm,
        Server(draft=DRAFT) as cold,
    ):
        computed = warm.compute(TOKENS)
        assert cold.load_prefix(TOKENS) == (len(TOKENS), computed)


def test_a_sliding_window_comes_back_with_its_prefix(config: dict[str, Any]) -> None:
    with server_world(config), Server("window") as warm, Server("window") as cold:
        computed = warm.compute(TOKENS)
        assert cold.load_prefix(TOKENS) == (len(TOKENS), computed)


def test_the_config_may_be_in_a_file(tmp_path: Path, file_config: dict[str, Any]) -> None:
    flags = tmp_path / "hicache.json"
    flags.write_text(as_flag(file_config))
    with server_world(f"@{flags}"), Server() as warm, Server() as cold:
        computed = warm.compute(TOKENS)
        assert cold.load_prefix(TOKENS) == (len(TOKENS), computed)


def test_a_layer_first_server(file_config: dict[str, Any]) -> None:
    with server_world(file_config, layout="layer_first"), Server() as warm, Server() as cold:
        computed = warm.compute(TOKENS)
        assert cold.load_prefix(TOKENS) == (len(TOKENS), computed)


def test_servers_of_other_layouts_share_no_pages(file_config: dict[str, Any]) -> None:
    with server_world(file_config), Server() as warm:
        warm.compute(TOKENS)
    with server_world(file_config, layout="layer_first"), Server() as other:
        assert other.load_prefix(TOKENS)[0] == 0


def test_detach_and_attach_while_it_runs(file_config: dict[str, Any]) -> None:
    with server_world(file_config):
        with Server() as warm:
            computed = warm.compute(TOKENS)
            assert warm.cache.detach_storage_backend()[0]
        with Server() as cold:
            assert cold.cache.detach_storage_backend()[0]
            flag = as_flag(file_config)
            done, message = cold.cache.attach_storage_backend("dynamic", flag, "org/model")
            assert done, message
            assert cold.load_prefix(TOKENS) == (len(TOKENS), computed)
