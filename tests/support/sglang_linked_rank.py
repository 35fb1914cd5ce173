"""One of two ranks of a server with a linker: `python sglang_linked_rank.py RANK DIRECTORY`.

Both compute a prompt and load it into a cold cache. Then each page of rank 1 is damaged, and both try to
load another prompt. A rank prints what it saw as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from serving.stores import _flip
from sglang_engine import TOKENS
from sglang_radix import LinkedServer, linker_world, torch

from hicache_storage import open_storage

RANKS = 2
_MORE = [7, *TOKENS[1:]]


def main(rank: int, directory: Path) -> None:
    ranks: Any = torch.distributed
    ranks.init_process_group(
        "gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=RANKS
    )
    config = {"backend_name": "file", "path": str(directory / "pages")}
    seen: dict[str, object] = {}
    with (
        linker_world(config, tp_rank=rank, tp_size=RANKS),
        LinkedServer() as warm,
        LinkedServer() as cold,
    ):
        computed = warm.compute(TOKENS)
        seen["is_loaded"] = cold.load_prefix(TOKENS) == (len(TOKENS), computed)
        warm.compute(_MORE)
        ranks.barrier()
        if rank == 0:
            damage_pages_of_rank_1(config["path"])
        ranks.barrier()
        free = cold.allocator.available_size()
        request = cold.match(_MORE)
        seen["found"] = request.matched.host_hit_length
        seen["loaded_in_spite_of_damage"] = cold.load(request)
        seen["is_free_again"] = cold.allocator.available_size() == free
        seen["corrupt"] = cold.storage.counters().get("load_corrupt", 0)
        ranks.barrier()
    print(json.dumps(seen))  # noqa: T201 - the test reads it


def damage_pages_of_rank_1(path: str) -> None:
    with open_storage("file", {"path": path}) as storage:
        _, other = sorted(storage.spaces(), key=lambda space: space.shard.heads or (0, 0))
        for page in list(storage.scan(other)):
            assert _flip(storage, other, page.page_hash, None)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
