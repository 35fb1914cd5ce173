"""`hicache-conformance [run]`: test a deployed store."""

from __future__ import annotations

import datetime as dt
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_storage import config
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_conformance.checks import Check
    from hicache_conformance.report.record import CheckRecord, Record
    from hicache_conformance.run.waivers import Waiver
    from hicache_storage.storage import Capabilities, HiCacheStorage

_MOST_PROCESSES = 4
_CHECKS_A_PROCESS = 12
"""So many checks are worth a process, because its start takes as long as some checks."""
_MOST_LEFT_SHOWN = 5
SUMMARY = "Test a store by the rules of the storage contract (default verb)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    config.add_arguments(parser, engine_flags_in_help=False)
    add = parser.add_argument_group("the run").add_argument
    add(
        "--report",
        type=Path,
        metavar="DIR",
        help="write result.json, report.html, junit.xml and badge.json to this directory",
    )
    add(
        "--rules",
        action="append",
        metavar="PATTERN",
        default=[],
        help='only these rules, such as "KV-1*"; may be given several times',
    )
    add("--spec", metavar="VERSION", help="the rules of this version (default: the newest)")
    add(
        "--strict",
        action="store_true",
        help="make the verdict partial if a rule could not be verified",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of everything random (default: %(default)s)",
    )
    add(
        "--quick",
        action="store_true",
        help="leave out slow checks, for use while you write a backend",
    )
    add("--waivers", type=Path, metavar="FILE", help="known violations, in a waivers.toml")


def run(arguments: argparse.Namespace) -> int:
    """Test the store and return the verdict's exit code."""
    choice = config.StorageChoice.from_arguments(arguments)
    from hicache_conformance.checks import all_checks  # noqa: PLC0415 - `--help` is quick
    from hicache_conformance.report.terminal import print_summary  # noqa: PLC0415
    from hicache_conformance.report.write import write_report  # noqa: PLC0415
    from hicache_conformance.rules import SPEC, selected  # noqa: PLC0415
    from hicache_conformance.run.isolation import describe_store  # noqa: PLC0415
    from hicache_conformance.run.operator import deployed_store  # noqa: PLC0415
    from hicache_conformance.run.verdict import RunFacts, make_record  # noqa: PLC0415

    rules = selected(arguments.rules, arguments.spec or SPEC)
    waivers = _waivers(arguments.waivers)
    _check_directory(arguments.report)
    storage_class, make_subject = deployed_store(choice.backend, choice.config)
    checks = [
        check
        for check in all_checks()
        if check.rule in rules and (check.quick or not arguments.quick)
    ]
    began_s, started_at = time.monotonic(), dt.datetime.now(dt.UTC)
    description, problem = describe_store(choice.backend, choice.config)
    claims = description.claims if description else None
    processes = _process_count(choice, claims, len(checks))
    records = [] if problem else _outcomes(choice, checks, arguments, processes)
    facts = RunFacts(
        name=_store_name(choice.backend, storage_class),
        storage_class=storage_class,
        claims=claims,
        absent=make_subject().absent,
        store_facts=description.facts if description else {},
        problem=problem,
        config=choice.config,
        started_at=started_at,
        elapsed_s=time.monotonic() - began_s,
        seed=arguments.seed,
        quick=arguments.quick,
        strict=arguments.strict,
        selection=tuple(arguments.rules),
        spec=arguments.spec or SPEC,
        command=shlex.join(["hicache-conformance", *sys.argv[1:]]),
    )
    record = make_record(facts, rules, records, waivers)
    print_summary(record)
    for line in _left_behind(record, own_store=_is_own(choice, claims)):
        sys.stdout.write(f"{line}\n")
    if arguments.report is not None:
        for path in write_report(record, arguments.report):
            sys.stdout.write(f"{path}\n")
    return record.verdict.exit_code


def _outcomes(
    choice: config.StorageChoice,
    checks: Sequence[Check],
    arguments: argparse.Namespace,
    processes: int,
) -> list[CheckRecord]:
    from hicache_conformance.report.terminal import Progress  # noqa: PLC0415
    from hicache_conformance.run.isolation import run_isolated  # noqa: PLC0415
    from hicache_conformance.run.runner import RunOptions  # noqa: PLC0415

    options = RunOptions(seed=arguments.seed, quick=arguments.quick)
    records: list[CheckRecord] = []
    with Progress(total=len(checks)) as progress:
        for record in run_isolated(
            choice.backend, choice.config, checks, options, processes=processes
        ):
            records.append(record)
            progress.advance(record)
    return records


def _process_count(choice: config.StorageChoice, claims: Capabilities | None, checks: int) -> int:
    """Return how many checks run at once: several, if each has a store of its own."""
    if not _is_own(choice, claims):
        return 1
    worth_it = -(-checks // _CHECKS_A_PROCESS)
    return max(1, min(_MOST_PROCESSES, 2 * (os.cpu_count() or 1), worth_it))


def _is_own(choice: config.StorageChoice, claims: Capabilities | None) -> bool:
    """Return True if each check has a store of its own, which disappears after the check.

    Either the config has a directory for each test, or pages live in one process only.
    """
    from hicache_storage.storage import Durability  # noqa: PLC0415 - `--help` is quick

    private = claims is not None and not claims.shared and claims.durability is Durability.PROCESS
    return private or "{scratch}" in str(choice.config)


def _left_behind(record: Record, *, own_store: bool) -> Iterator[str]:
    """Yield lines about pages that the run has left in a store that outlives it.

    The lines come from the finished record, whose texts hold no secret of the config.
    """
    from hicache_conformance.case.case import LEFT_IN_STORE  # noqa: PLC0415 - `--help` is quick

    records = [check for rule in record.rules for check in rule.checks]
    if own_store or not records:
        return
    left = [check for check in records if LEFT_IN_STORE in check.evidence]
    for check in left[:_MOST_LEFT_SHOWN]:
        yield f"  left in the store by {check.name}: {check.evidence[LEFT_IN_STORE]}"
    if len(left) > _MOST_LEFT_SHOWN:
        yield f"  and by {len(left) - _MOST_LEFT_SHOWN} more checks: see result.json of --report"
    yield "  The store may still list key spaces of models conformance/hc...; " + (
        "remove them with all their pages." if left else "they hold no pages."
    )


def _store_name(backend: str, storage_class: type[HiCacheStorage]) -> str:
    """Return the store's name in the report. For `dynamic`, which names no store, use the class."""
    return storage_class.__name__ if backend == "dynamic" else backend


def _waivers(path: Path | None) -> Mapping[str, Waiver]:
    if path is None:
        return {}
    from hicache_conformance.run.waivers import read_waivers  # noqa: PLC0415

    return read_waivers(path)


def _check_directory(path: Path | None) -> None:
    """Make the directory, and raise before the run if the report could not be written after it."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--report {path}: is a file, not a directory") from None
    except OSError as error:
        raise ConfigError(f"--report {path}: cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--report {path}: this user may not write there")
