from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hicache_conformance.checks import all_checks
from hicache_conformance.run.isolation import describe_store, run_isolated, worker
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions
from hicache_conformance.tools.processes.child import Link
from processes import is_alive
from servers import RedisServer, wait_until

from hicache_storage.storage import Retention


def odd(class_name: str) -> dict[str, str]:
    return {
        "backend_name": "odd",
        "module_path": "odd_stores",
        "class_name": class_name,
    }


def outcomes(class_name: str, *rule_ids: str) -> dict[str, list[Outcome]]:
    """Return the outcomes of the quick checks of the tested rules, by rule."""
    checks = [check for check in all_checks() if check.rule.id in rule_ids and check.quick]
    found: dict[str, list[Outcome]] = {}
    for record in run_isolated("dynamic", odd(class_name), checks, RunOptions(quick=True)):
        found.setdefault(record.name.partition(":")[0], []).append(record.outcome)
    return found


def test_a_store_that_kills_the_process_fails_the_checks_in_which_it_does() -> None:
    found = outcomes("Crashing", "KV-001", "KV-203", "KV-401")

    assert Outcome.FAILED in found["KV-001"]
    assert {Outcome.NOT_DECLARED} == set(found["KV-401"])


def test_the_checks_after_a_death_still_run() -> None:
    wanted = ("KV-203", "KV-504")
    checks = [check for check in all_checks() if check.rule.id in wanted and check.quick]

    records = list(run_isolated("dynamic", odd("Exiting"), checks, RunOptions(quick=True)))

    assert [check.name for check in checks] == [record.name for record in records]
    deaths = [record for record in records if "exit code 7" in record.message]
    assert deaths
    assert {Outcome.FAILED} == {record.outcome for record in deaths}
    assert Outcome.NOT_DECLARED is records[-1].outcome


def test_claims_are_those_of_an_open_instance() -> None:
    described, problem = describe_store("memory", {})

    assert described is not None
    assert (Retention.UNTIL_DELETED, "") == (described.claims.retention, problem)


def test_facts_are_those_of_the_server(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory", "9mb", "--maxmemory-policy", "allkeys-lru") as server:
        described, _ = describe_store("redis", {"url": server.url})

    assert described is not None
    assert described.facts["server"].startswith("Redis ")
    assert described.facts["eviction"].startswith("allkeys-lru, ")


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        ("dynamic", odd("Down"), "connection refused"),
        ("file", {"path": "/proc/nowhere"}, "/proc/nowhere"),
        ("file", {}, "path"),
    ],
)
def test_a_store_that_cannot_be_opened_is_reported(
    name: str, config: dict[str, str], named: str
) -> None:
    described, problem = describe_store(name, config)

    assert described is None
    assert named in problem


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty directory the one for temporary files."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_a_run_in_which_processes_die_leaves_nothing(temporary: Path) -> None:
    assert Outcome.FAILED in outcomes("Exiting", "KV-203")["KV-203"]

    assert [] == list(temporary.iterdir())


WRITES_FOR_EVER = """
import itertools, pathlib, tempfile
for number in itertools.count():
    path = pathlib.Path(tempfile.gettempdir(), str(number % 100))
    path.mkdir(parents=True, exist_ok=True)
    path.joinpath("page").touch()
"""


def _starts_a_writer(link: Link) -> None:
    """Start, as an actor, a process that outlives this one."""
    with subprocess.Popen([sys.executable, "-c", WRITES_FOR_EVER]) as writer:
        link.send(writer.pid)
        link.receive()


def test_children_of_a_killed_process_are_killed_too(temporary: Path) -> None:
    with worker(_starts_a_writer) as one:
        writer = one.receive()
        wait_until(lambda: any(temporary.glob("*/99/page")))

    wait_until(lambda: not is_alive(writer))
    assert [] == list(temporary.iterdir())
