"""A replay over `mooncake`: target and draft pages, from two processes at once. `make test-mooncake`."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from replays import assert_shared
from servers import MooncakeMaster, load_mooncake

from hicache_storage import open_storage

load_mooncake()


def test_two_processes_share_pages_in_the_segment_of_a_third(tmp_path: Path) -> None:
    with MooncakeMaster(tmp_path / "master") as master:

        def has_pages() -> bool:
            url = f"http://127.0.0.1:{master.metrics_port}/get_all_keys"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return len(answer.read().split()) > 10

        with open_storage("mooncake", master.config(global_segment_size="256mb")):
            config = master.config(global_segment_size=0)
            assert_shared("mooncake", config, tmp_path, has_pages)
