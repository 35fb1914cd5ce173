"""The demo of vLLM: `make demo-vllm`.

`vllm serve` answers long prompts with a model of random weights. It is ended and started again over our
`file` store and over vLLM's own `fs` tier, and then once more after one bit of every page was flipped.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from serving.demo import OURS, OWN, Demo, Store, run
from serving.models import LARGE, checkpoint, prompt
from serving.vllm.server import VERSION, VLLMServer, fs, ours

PROMPTS = 3
LENGTH = 2100
_CPU_NBYTES = 512 << 20


def flip_bits(directory: Path, seed: int = 0) -> int:
    """Flip one bit in the middle half of every page. Return the number of pages."""
    chosen = random.Random(seed)
    pages = sorted(
        path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 65536
    )
    for path in pages:
        size = path.stat().st_size
        with path.open("r+b") as page:
            place = chosen.randrange(size // 4, size * 3 // 4)
            page.seek(place)
            byte = page.read(1)[0] ^ 1 << chosen.randrange(8)
            page.seek(place)
            page.write(bytes([byte]))
    return len(pages)


def main() -> int:
    """Run the demo in a temporary directory."""
    checkpoint(LARGE)
    with tempfile.TemporaryDirectory() as scratch:
        pages: dict[Store, Path] = {store: Path(scratch, store) for store in (OURS, OWN)}
        configs = {
            OURS: ours("file", {"path": str(pages[OURS])}, _CPU_NBYTES),
            OWN: fs(pages[OWN], _CPU_NBYTES),
        }

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
                engine=VERSION,
                stores={OURS: "file (ours)", OWN: "fs (vLLM's)"},
                prompts=[prompt(number, LENGTH) for number in range(PROMPTS)],
                warm_up=prompt(1000, 100),
                serve=serve,
                damage=lambda store: flip_bits(pages[store]),
            )
        )


if __name__ == "__main__":
    sys.exit(main())
