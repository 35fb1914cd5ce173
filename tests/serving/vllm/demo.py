"""The demo of vLLM: `make demo-vllm`.

`vllm serve` answers long prompts with a model of random weights. It is ended and started again over our
`file` store and over vLLM's own `fs` tier. Then it is asked what it has not loaded yet, after one bit of
every page was flipped.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving.demo import OURS, OWN, Demo, Store, run
from serving.models import LARGE, checkpoint, prompt
from serving.stores import Store as PageStore
from serving.stores import flip_in_files
from serving.vllm.server import VERSION, VLLMServer, fs, ours

PROMPTS = 6
LENGTH = 1500
_CPU_NBYTES = 512 << 20


def main() -> int:
    """Run the demo in a temporary directory."""
    checkpoint(LARGE)
    with tempfile.TemporaryDirectory() as scratch:
        ours_config, own_pages = {"path": str(Path(scratch, OURS))}, Path(scratch, OWN)
        configs: dict[Store, dict[str, Any]] = {
            OURS: ours("file", ours_config, _CPU_NBYTES),
            OWN: fs(own_pages, _CPU_NBYTES),
        }

        def damage(store: Store) -> int:
            if store == OURS:
                return PageStore("file", ours_config).damage()
            return flip_in_files(own_pages.rglob("*.bin"))

        @contextmanager
        def serve(store: Store) -> Generator[VLLMServer]:
            directory = Path(tempfile.mkdtemp(dir=scratch, prefix="server-"))
            options = ("--shutdown-timeout", "10")
            with VLLMServer(
                directory, configs[store], *options, model=LARGE, kv_cache_gib=1
            ) as server:
                yield server
                server.end()

        return run(
            Demo(
                name="vLLM",
                engine=VERSION,
                stores={OURS: "file (ours)", OWN: "fs (vLLM's)"},
                prompts=[prompt(number, LENGTH) for number in range(PROMPTS)],
                warm_up=prompt(1000, 100),
                serve=serve,
                damage=damage,
            )
        )


if __name__ == "__main__":
    sys.exit(main())
