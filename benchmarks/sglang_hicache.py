"""Compare our backends with SGLang's: backup and prefetch through SGLang's own cache controller.

python benchmarks/sglang_hicache.py [--rounds N] [--pages N] [--only file,hf3fs,mooncake,s3]

`make bench-sglang` makes its environment. A run is one operation of SGLang's: `backup` from
`write_storage` to its acknowledgment, `prefetch` from the query to the last page in host memory. Ours
verifies a checksum of every page; SGLang's have none. A store is emptied after every backup. But a store
with slots is full from the beginning, so every backup takes the slots of other pages.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _harness import Candidate, Parser, Report, names, scratch
from _hf3fs_metadata import Hf3fsMetadata
from servers import MooncakeMaster, Rclone, load_mooncake
from sglang_engine import Engine, PoolName, PoolPlan, engine_world

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    Pair: TypeAlias = dict[str, tuple[str, dict[str, Any]]]
    """The arguments of SGLang's factory for each row: a backend's name, and its extra config."""

PAGE_TOKENS = 64
PLANS = {
    "Llama-3.1-8B": PoolPlan(layers=32, heads=8, head_dim=128),
    "DeepSeek-V3": PoolPlan(kind="mla", layers=61, latent=(512, 64)),
}
OURS = {
    "module_path": "hicache_storage.integrations.sglang",
    "class_name": "SGLangHiCacheStorage",
    "interface_v1": 1,
}
_FULL_NBYTES = 512 << 20
"""The capacity of a store with slots."""
_OF_SLOTS = frozenset({"hf3fs"})
_prompts = itertools.count()


class Backup(Candidate):
    """A candidate that writes a new prompt, then empties the store unless that must stay full."""

    def __init__(self, name: str, engine: Engine, pages: int, *, full: bool = False) -> None:
        self.name = name
        self._engine = engine
        self._pages = pages
        self._full = full
        self._tokens: list[int] = []
        self._written: Any = None

    def prepare(self, turn: int) -> None:  # noqa: ARG002 - every prompt is new
        self._tokens = prompt(self._pages)

    def run(self) -> None:
        self._written = self._engine.write(self._tokens, compare=False)

    def check(self) -> None:
        if self._written.pages != self._pages:
            raise RuntimeError(f"{self.name} stored {self._written.pages} of {self._pages} pages")
        self._engine.host().free(self._written.places[PoolName.KV])
        if not self._full:
            self._engine.storage.clear()


class Prefetch(Candidate):
    """A candidate that reads one prompt repeatedly, into different host pages."""

    def __init__(self, name: str, engine: Engine, pages: int) -> None:
        self.name = name
        self._engine = engine
        self._pages = pages
        self._tokens = prompt(pages)
        written = engine.write(self._tokens)
        self._wanted = written.held[PoolName.KV]
        engine.host().free(written.places[PoolName.KV])
        self._read: Any = None

    def run(self) -> None:
        self._read = self._engine.read(self._tokens, compare=False)

    def check(self) -> None:
        indices = self._read.operation.host_indices
        if self._read.pages != self._pages:
            raise RuntimeError(f"{self.name} read {self._read.pages} of {self._pages} pages")
        if self._engine.bytes_at(PoolName.KV, indices) != self._wanted:
            raise RuntimeError(f"{self.name} read other bytes than were written")
        self._engine.host().free(indices)


def prompt(pages: int) -> list[int]:
    """Return the tokens of a prompt that shares no prefix with an earlier one."""
    return [next(_prompts), *range(1, pages * PAGE_TOKENS)]


def file_pair(stack: ExitStack, root: Path, plan: PoolPlan) -> Pair:  # noqa: ARG001
    ours = {**OURS, "backend_name": "file", "path": str(root / "ours")}
    return {
        "ours: file": ("dynamic", ours),
        "SGLang: file": ("file", {"file_storage_path": str(root / "theirs")}),
    }


def hf3fs_pair(stack: ExitStack, root: Path, plan: PoolPlan) -> Pair:
    """Return our backend, and SGLang's with its mock client, which uses plain reads and writes."""
    config = root / "hf3fs.json"
    fields: dict[str, Any] = {"file_path_prefix": str(root / "theirs"), "file_size": _FULL_NBYTES}
    fields |= {"numjobs": 16, "entries": 8}
    if plan.kind == "mla":  # only MLA needs the server; otherwise metadata are in a dict
        server = stack.enter_context(Hf3fsMetadata(root / "metadata"))
        fields["metadata_server_url"] = server.url
    config.write_text(json.dumps(fields))
    os.environ["SGLANG_HICACHE_HF3FS_CONFIG_PATH"] = str(config)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGQUIT,
    ):  # the backend replaces these handlers
        stack.callback(signal.signal, number, signal.getsignal(number))
    ours = {**OURS, "backend_name": "hf3fs", "index": "sqlite", "capacity_nbytes": _FULL_NBYTES}
    buffered, direct = root / "buffered", root / "direct"
    return {
        "ours: hf3fs": ("dynamic", {**ours, "path": str(buffered), "direct": False}),
        "ours: hf3fs, direct": ("dynamic", {**ours, "path": str(direct), "direct": True}),
        "SGLang: hf3fs, mock": ("hf3fs", {"use_mock_hf3fs_client": True}),
    }


def mooncake_pair(stack: ExitStack, root: Path, plan: PoolPlan) -> Pair:  # noqa: ARG001
    """Return our backend and SGLang's, each with its own master and segment, over loopback TCP."""
    load_mooncake()
    masters = [stack.enter_context(MooncakeMaster(root / name)) for name in ("ours", "theirs")]
    our_config, theirs = (master.config(global_segment_size="2gb") for master in masters)
    ours = {**OURS, "backend_name": "mooncake", "config": our_config}
    lent: dict[str, Any] = {"lend_memory": "always"}
    return {
        "ours: mooncake": ("dynamic", ours),
        "ours: mooncake, memory lent": ("dynamic", {**ours, "adapter": lent}),
        "ours: mooncake, memory lent, no checksum": (
            "dynamic",
            {**ours, "adapter": {**lent, "checksum": "none"}},
        ),
        "SGLang: mooncake": ("mooncake", {**theirs, "metadata_server": "P2PHANDSHAKE"}),
    }


def s3_pair(stack: ExitStack, root: Path, plan: PoolPlan) -> Pair:  # noqa: ARG001
    """Return our backend and SGLang's, over rclone's S3 server on a directory."""
    server = stack.enter_context(Rclone(root))
    keys = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
    ours = {"bucket": "ours", "endpoint_url": server.endpoint_url, **keys}
    theirs = {"access_key": server.access_key, "secret_key": server.secret_key}
    theirs |= {"endpoint": server.endpoint_url, "bucket": "theirs", "region": "us-east-1"}
    (root / "data" / "ours").mkdir(parents=True, exist_ok=True)
    return {
        "ours: s3": ("dynamic", {**OURS, "backend_name": "s3", "config": ours}),
        "SGLang: seaweedfs": ("seaweedfs", theirs),
    }


PAIRS: dict[str, Callable[[ExitStack, Path, PoolPlan], Pair]] = {
    "file": file_pair,
    "hf3fs": hf3fs_pair,
    "mooncake": mooncake_pair,
    "s3": s3_pair,
}


def measure(report: Report, kind: str, model: str, options: argparse.Namespace) -> None:
    """Measure both directions of one pair of stores, for one model's pages."""
    plan = PLANS[model]
    with scratch(options.path) as root, ExitStack() as stack:
        pair = PAIRS[kind](stack, root, plan)
        engines = {
            name: stack.enter_context(
                Engine(
                    [plan], config, backend=backend, pages=options.pages, page_tokens=PAGE_TOKENS
                )
            )
            for name, (backend, config) in pair.items()
        }
        for engine in engines.values():
            engine.fill(1)
        page_nbytes = next(iter(engines.values())).host().size_per_token * PAGE_TOKENS
        operation_nbytes = options.pages * page_nbytes
        full = kind in _OF_SLOTS
        if full:
            fill_up(engines, options.pages, -(-_FULL_NBYTES // operation_nbytes))
        for title, candidate in (("backup", partial(Backup, full=full)), ("prefetch", Prefetch)):
            report.measure(
                f"{title}, {model}: {options.pages} pages of {page_nbytes / 1e6:.1f} MB",
                [candidate(name, engine, options.pages) for name, engine in engines.items()],
                options.rounds,
                work=operation_nbytes / 1e9,
                baselines=[name for name in engines if name.startswith("SGLang")],
            )


def fill_up(engines: dict[str, Engine], pages: int, operations: int) -> None:
    """Fill each store, so that each further page replaces another one."""
    for name, engine in engines.items():
        backup = Backup(name, engine, pages, full=True)
        for turn in range(operations):
            backup.prepare(turn)
            backup.run()
            backup.check()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__, rounds=5, path=True)
    parser.add_argument("--pages", type=int, default=16, help="pages of an operation")
    parser.add_argument("--only", type=names, default=list(PAIRS), help="kinds of stores")
    options = parser.parsed(arguments)
    report = Report.begin(Path(tempfile.gettempdir()), distributions=["torch", "sglang"])
    with engine_world():
        for kind in options.only:
            for model in PLANS:
                measure(report, kind, model, options)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
