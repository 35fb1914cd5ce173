"""Runs the programs of `reproducers/`, which show broken rules with a store alone.

    python -m field.reproduce docs/field/reproduced STORE...

A program has at most thirty lines and uses nothing of this project, so anybody can run it beside the
store. Each line that it prints names rules, says what it saw, and ends with `: True` if it saw it:

    KV-404: a flipped bit is a hit: True
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

PROGRAMS = Path(__file__).parent / "reproducers"
LIMIT_S = 120.0
_LINE = re.compile(r"(KV-\d{3}(?: KV-\d{3})*): (.*): (True|False)")


@dataclass(frozen=True)
class Plan:
    """How the programs of one store are run."""

    distribution: str
    """The distribution of the store, whose version is recorded."""
    programs: tuple[str, ...]
    """Files in `reproducers/`, without `.py`."""
    arguments: Callable[[Path], AbstractContextManager[list[str]]]
    """The arguments of each program, for a folder of its own. A server that it needs runs meanwhile."""
    prelude: str = ""
    """What runs before each program, because an environment here has only a part of an engine."""


@dataclass(frozen=True)
class Sighting:
    """What a program said about one or more rules."""

    rules: tuple[str, ...]
    text: str
    program: str
    seen: bool


def sightings(program: str, output: str) -> list[Sighting]:
    """Return what a program printed about rules."""
    found = [_LINE.fullmatch(line) for line in output.splitlines()]
    return [
        Sighting(tuple(one[1].split()), one[2], program, one[3] == "True") for one in found if one
    ]


def reproduce(plan: Plan) -> list[Sighting]:
    """Run the programs of a store, each in a folder of its own.

    Raises:
        RuntimeError: A program failed. The message has the end of its output.
    """
    seen: list[Sighting] = []
    for program in plan.programs:
        path = str(PROGRAMS / f"{program}.py")
        code = f"import runpy\n{plan.prelude}\nrunpy.run_path({path!r}, run_name='__main__')"
        with tempfile.TemporaryDirectory() as folder, plan.arguments(Path(folder)) as arguments:
            done = subprocess.run(  # noqa: S603 - the programs of this folder
                [sys.executable, "-W", "ignore", "-c", code, *arguments],
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_S,
            )
        found = sightings(program, done.stdout)
        if done.returncode or not found:
            raise RuntimeError(
                f"{program} {arguments} ended with {done.returncode} after {len(found)} lines:"
                f" {done.stderr[-2000:]}"
            )
        seen += found
    return seen


def _folder(folder: Path) -> AbstractContextManager[list[str]]:
    return nullcontext([str(folder)])


def _lmcache(kind: str) -> Callable[[Path], AbstractContextManager[list[str]]]:
    def arguments(folder: Path) -> AbstractContextManager[list[str]]:
        return nullcontext([json.dumps({"type": kind, "base_path": str(folder)})])

    return arguments


@contextmanager
def _lmcache_resp(folder: Path) -> Generator[list[str]]:
    from servers import RedisServer  # noqa: PLC0415 - of the tests

    with RedisServer(folder) as server:
        yield [json.dumps({"type": "resp", "host": "127.0.0.1", "port": server.port})]


@contextmanager
def _lmcache_s3(folder: Path) -> Generator[list[str]]:
    from s3_kit import BucketHost  # noqa: PLC0415 - of the tests

    with BucketHost(folder) as server:
        keys = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
        place = {"s3_endpoint": server.config["endpoint"], "s3_region": "us-east-1"}
        yield [json.dumps({"type": "s3", "disable_tls": True, **place, **keys})]


@contextmanager
def _s3(folder: Path) -> Generator[list[str]]:
    from servers import Ministack  # noqa: PLC0415 - of the tests

    with Ministack(folder) as server:
        yield [server.endpoint_url, server.access_key, server.secret_key]


@contextmanager
def _mooncake(folder: Path) -> Generator[list[str]]:
    from servers import MooncakeMaster, MooncakeNode  # noqa: PLC0415 - of the tests

    with MooncakeMaster(folder) as master, MooncakeNode(master, "64mb"):
        yield [json.dumps(master.config(metadata_server="P2PHANDSHAKE", global_segment_size=0))]


@contextmanager
def _redis(folder: Path) -> Generator[list[str]]:
    from servers import RedisServer  # noqa: PLC0415 - of the tests

    with RedisServer(folder) as server:
        yield [server.url]


@contextmanager
def _openlake(folder: Path) -> Generator[list[str]]:
    from field.tests.vllm.openlake import OpenLakeServer  # noqa: PLC0415 - needs the kit

    with OpenLakeServer(folder) as server:
        yield [f"127.0.0.1:{server.port}"]


@contextmanager
def _peercache(folder: Path) -> Generator[list[str]]:
    from field.tests.sglang.peercache import PeerCacheServer  # noqa: PLC0415 - needs the kit

    with PeerCacheServer(folder) as server:
        yield [str(server.port)]


_SGLANG = "from field.sglang.engine import module; module('mem_cache.hicache_storage')"
"""`sglang` without the imports of its front end, whose packages are not in the environment."""
_HF3FS = "from field.sglang.hf3fs import _hf3fs; _hf3fs()"
_NIXL = (
    "from field.sglang.nixl import _UNUSED_CLASSES, module, replace_classes;"
    "replace_classes(_UNUSED_CLASSES); module('mem_cache.storage.nixl.hicache_nixl')"
)
_MOONCAKE = (
    "from servers import load_mooncake; load_mooncake();"
    "from field.sglang.mooncake import _POOLS, replace_classes; replace_classes(_POOLS)"
)
PLANS = {
    "lmcache-fs": Plan("lmcache", ("lmcache/keys", "lmcache/damage"), _lmcache("fs")),
    "lmcache-fs-native": Plan("lmcache", ("lmcache/keys", "lmcache/damage"), _lmcache("fs_native")),
    "lmcache-resp": Plan(
        "lmcache",
        ("lmcache/keys", "lmcache/resp", "lmcache/lookups", "lmcache/deleted"),
        _lmcache_resp,
    ),
    "lmcache-s3": Plan("lmcache", ("lmcache/keys", "lmcache/s3"), _lmcache_s3),
    "openlake": Plan("openlake-vllm", ("openlake/pages", "openlake/closing"), _openlake),
    "peercache": Plan(
        "peercache",
        (
            "peercache/pages",
            "peercache/ring",
            "peercache/closing",
            "peercache/leaving",
            "peercache/sizes",
            "peercache/unwritten",
            "peercache/evicted",
            "peercache/damage",
        ),
        _peercache,
    ),
    "redhare": Plan("redhare", ("redhare/pages", "redhare/closing", "redhare/layout"), _redis),
    "sglang-file": Plan(
        "sglang", ("sglang-file/keys", "sglang-file/damage", "sglang-file/clear"), _folder, _SGLANG
    ),
    "sglang-hf3fs": Plan(
        "sglang",
        ("sglang-hf3fs/pages", "sglang-hf3fs/server", "sglang-hf3fs/slots"),
        _folder,
        _HF3FS,
    ),
    "sglang-mooncake": Plan(
        "sglang", ("sglang-mooncake/keys", "sglang-mooncake/objects"), _mooncake, _MOONCAKE
    ),
    "sglang-nixl": Plan(
        "sglang",
        ("sglang-nixl/keys", "sglang-nixl/files", "sglang-nixl/writes"),
        _folder,
        _NIXL,
    ),
    "sglang-seaweedfs": Plan(
        "sglang", ("sglang-seaweedfs/pages", "sglang-seaweedfs/damage"), _s3, _SGLANG
    ),
    "spoolcache": Plan("spoolcache", ("spoolcache/damage", "spoolcache/opening"), _folder),
    "vllm-fs": Plan("vllm", ("vllm-fs/pages",), _folder),
}


def main(directory: Path, stores: list[str]) -> None:
    """Write `STORE.json` for each store into the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for store in stores:
        plan = PLANS[store]
        seen = reproduce(plan)
        record = {
            "version": f"{plan.distribution} {metadata.version(plan.distribution)}",
            "seen": [
                {"rules": one.rules, "text": one.text, "program": one.program}
                for one in seen
                if one.seen
            ],
        }
        text = json.dumps(record, indent=2, ensure_ascii=False)
        (directory / f"{store}.json").write_text(f"{text}\n", encoding="utf-8")
        for one in seen:
            sys.stdout.write(
                f"{store}: {' '.join(one.rules)}: {one.text}{'' if one.seen else ' - NOT SEEN'}\n"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
