"""`hicache-conformance`, as an operator types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hicache_backends.file import FileStorage
from hicache_backends.memory import MemoryStorage
from hicache_conformance.case.case import LEFT_IN_STORE
from hicache_conformance.cli.run import _left_behind, _process_count
from hicache_conformance.report.redact import Redactor
from hicache_conformance.run.outcomes import Outcome
from report_samples import check_of, record_of, rule_of

from hicache_storage.config import StorageChoice
from hicache_storage.storage import Capabilities

TESTS = Path(__file__).parents[2] / "support"


def typed(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hicache_conformance", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )


def judging(class_name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command on one of the odd stores."""
    config = {
        "backend_name": "odd",
        "module_path": "odd_stores",
        "class_name": class_name,
    }
    return typed(
        "--hicache-storage-backend",
        "dynamic",
        "--hicache-storage-backend-extra-config",
        json.dumps(config),
        "--quick",
        *arguments,
    )


def test_a_conformant_store_exits_with_0_and_leaves_a_report(tmp_path: Path) -> None:
    done = typed(
        *("--hicache-storage-backend", "memory", "--rules", "KV-00[17]", "--quick"),
        *("--report", str(tmp_path / "out")),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (2, "incomplete") == (result["schema_version"], result["verdict"])
    assert result["rules"][0]["id"] == "KV-001"
    assert "\x1b" not in done.stdout + done.stderr


def test_a_broken_rule_exits_with_1_and_is_named(tmp_path: Path) -> None:
    done = judging("Deaf", "--rules", "KV-203", "--report", str(tmp_path))

    assert done.returncode == 1
    assert "KV-203" in done.stdout
    failed = [
        rule["id"]
        for rule in json.loads((tmp_path / "result.json").read_text())["rules"]
        if rule["outcome"] == "failed"
    ]
    assert ["KV-203"] == failed


def test_a_waived_rule_exits_with_2(tmp_path: Path) -> None:
    waivers = tmp_path / "waivers.toml"
    waivers.write_text(
        '[[waiver]]\nrule = "KV-203"\nreason = "known"\nlink = "https://example.org/1"\n'
        "until = 2999-01-01\n"
    )

    done = judging("Deaf", "--rules", "KV-001", "--rules", "KV-203", "--waivers", str(waivers))

    assert done.returncode == 2, done.stdout + done.stderr


def test_a_strict_run_with_a_rule_not_verified_exits_with_2() -> None:
    arguments = ("--hicache-storage-backend", "memory", "--rules", "KV-203", "--rules", "KV-404")

    assert typed(*arguments).returncode == 0
    assert typed(*arguments, "--strict").returncode == 2


def test_a_store_that_cannot_be_opened_exits_with_3_and_says_why(tmp_path: Path) -> None:
    done = judging("Down", "--report", str(tmp_path))

    assert done.returncode == 3
    assert "connection refused" in done.stdout
    assert json.loads((tmp_path / "result.json").read_text())["verdict"] == "inconclusive"


def test_a_run_in_which_no_rule_ran_exits_with_3() -> None:
    done = typed("--hicache-storage-backend", "memory", "--rules", "KV-401")

    assert done.returncode == 3
    assert "no selected rule ran" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--hicache-storage-backend is required"),
        (["--hicache-storage-backend", "flie"], "did you mean 'file'"),
        (["--hicache-storage-backend", "memory", "--rules", "KV-7*"], "KV-7*"),
        (["--hicache-storage-backend", "memory", "--spec", "0.1"], "--spec 0.1"),
        (["--hicache-storage-backend", "memory", "--waivers", "nowhere.toml"], "nowhere.toml"),
        (["--hicache-storage-backend", "memory", "--repot", "out"], "--report"),
        (["--hicache-storage-backend", "memory", "--report", __file__], "is a file"),
        (["--hicache-storage-backend", "memory", "--report", "/proc/out"], "cannot be made"),
        (["compare", "a.json", "b.json"], "a.json"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_3(arguments: list[str], named: str) -> None:
    done = typed(*arguments)

    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_the_surrounding_folder_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("raise SystemExit('loaded')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    (tmp_path / "hicache_storage.py").write_text("raise SystemExit('shadowed')")
    program = "import sys; from hicache_conformance.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["--hicache-storage-backend", "memory", "--rules", "KV-001"]

    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_dynamic_store_may_lie_in_the_folder_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "acme_here.py").write_text(
        "from hicache_backends.memory import MemoryStorage\nclass Acme(MemoryStorage): pass\n"
    )
    config = {"backend_name": "acme", "module_path": "acme_here", "class_name": "Acme"}
    script = Path(sys.executable).parent / "hicache-conformance"

    done = subprocess.run(
        [
            str(script),
            "--hicache-storage-backend",
            "dynamic",
            "--hicache-storage-backend-extra-config",
            json.dumps(config),
            "--rules",
            "KV-001",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "config", "claims", "several"),
    [
        ("memory", {}, MemoryStorage.capabilities, True),
        ("file", {"path": "{scratch}"}, FileStorage.capabilities, True),
        ("file", {"path": "/data"}, FileStorage.capabilities, False),
        ("memory", {}, None, False),
    ],
)
def test_checks_run_at_once_where_each_has_a_store_of_its_own(
    name: str, config: dict[str, str], claims: Capabilities | None, *, several: bool
) -> None:
    choice = StorageChoice(backend=name, config=config)

    assert several == (_process_count(choice, claims, checks=200) > 1)


@pytest.mark.parametrize(("checks", "processes"), [(0, 1), (1, 1), (12, 1), (13, 2), (24, 2)])
def test_a_few_checks_run_in_few_processes(checks: int, processes: int) -> None:
    choice = StorageChoice(backend="memory", config={})

    assert processes == _process_count(choice, MemoryStorage.capabilities, checks)


def test_two_runs_are_compared(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    typed("--hicache-storage-backend", "memory", "--rules", "KV-203", "--report", str(good))
    judging("Deaf", "--rules", "KV-203", "--report", str(bad))

    worse = typed("compare", str(good / "result.json"), str(bad / "result.json"))
    better = typed("compare", str(bad / "result.json"), str(good / "result.json"))

    assert (1, 0) == (worse.returncode, better.returncode)
    assert "KV-203" in worse.stdout


def test_the_rules_are_printed_as_the_page_has_them() -> None:
    page = TESTS.parents[1] / "docs" / "rules.md"

    assert typed("rules").stdout == page.read_text(encoding="utf-8"), "make rules-page"


def test_help_names_the_other_verbs() -> None:
    done = typed("--help")

    assert done.returncode == 0
    assert all(verb in done.stdout for verb in ("selftest", "compare", "rules", "--strict"))


def test_help_offers_no_flag_that_only_an_engine_needs() -> None:
    shown = typed("--help").stdout

    assert "--hicache-storage-backend-extra-config" in shown
    for flag in ("write-policy", "prefetch-policy", "mem-layout", "--page-size", "served-model"):
        assert flag not in shown


def test_an_engine_s_command_line_can_be_pasted() -> None:
    done = typed(
        *("--hicache-storage-backend", "memory", "--rules", "KV-001", "--quick"),
        *("--hicache-write-policy", "write_back", "--page-size", "64"),
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_dynamic_store_is_called_by_its_class() -> None:
    shown = judging("Undeleting", "--rules", "KV-001").stdout

    assert "Undeleting: " in shown
    assert "dynamic" not in shown


def test_leftovers_of_a_run_are_shown_without_the_secrets_of_the_config() -> None:
    told = {LEFT_IN_STORE: "pages of hc0: RuntimeError: hunter2-do-not-tell"}
    rule = rule_of("KV-001", Outcome.PASSED, check_of("KV-001", evidence=told))
    record = Redactor.of({"password": "hunter2-do-not-tell"}).record(record_of(rule))

    lines = list(_left_behind(record, own_store=False))

    assert "pages of hc0: RuntimeError: ***" in lines[0]
    assert "hunter2" not in "".join(lines)
