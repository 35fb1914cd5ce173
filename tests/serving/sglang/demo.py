"""The demo of SGLang: `make demo-sglang`, with `DEMO=--linker` through our linker instead of HiCache.

SGLang's server answers long prompts with a model of random weights. It is ended and started again over
our `file` store and over SGLang's own `file` backend. Then it is asked what it has not loaded yet, after
one bit of every page was flipped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from serving.demo import OURS, OWN, Demo, Store, run
from serving.models import MEDIUM, checkpoint, prompt
from serving.sglang.server import VERSION, LinkedServer, SGLangServer, ours, own_file
from serving.stores import flip_in_files

PROMPTS = 6
LENGTH = 2100
_LEAST_PAGE_NBYTES = 1 << 16
"""Smaller files describe the pages."""


def pages(directory: Path) -> list[Path]:
    """Return the files of the pages that a store keeps in a directory."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return [path for path in files if path.stat().st_size >= _LEAST_PAGE_NBYTES]


def main(*, linked: bool) -> int:
    """Run the demo in a temporary directory. SGLang's own `file` is always below HiCache."""
    checkpoint(MEDIUM)
    makers = {OURS: LinkedServer if linked else SGLangServer, OWN: SGLangServer}
    with tempfile.TemporaryDirectory() as scratch:
        directories: dict[Store, Path] = {store: Path(scratch, store) for store in (OURS, OWN)}
        attachments = {OURS: ours("file", {"path": str(directories[OURS])}), OWN: own_file()}

        @contextmanager
        def serve(store: Store) -> Generator[SGLangServer]:
            with makers[store](
                Path(tempfile.mkdtemp(dir=scratch, prefix="server-")),
                attachments[store],
                model=MEDIUM,
                tokens=8192,
                own_directory=directories[OWN],
            ) as server:
                yield server
                server.end()

        return run(
            Demo(
                name="SGLang linker" if linked else "SGLang",
                engine=f"{VERSION}, ours as a linker" if linked else VERSION,
                stores={OURS: "file (ours)", OWN: "file (SGLang's)"},
                prompts=[prompt(number, LENGTH) for number in range(PROMPTS)],
                warm_up=prompt(1000, 100),
                serve=serve,
                damage=lambda store: flip_in_files(pages(directories[store])),
            )
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--linker", action="store_true", help="our linker instead of HiCache")
    sys.exit(main(linked=parser.parse_args().linker))
