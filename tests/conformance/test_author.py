"""The kit as a backend's author uses it with pytest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

STORE = """
import time
from hicache_conformance import StorageConformance
from hicache_backends.memory import MemoryStorage

class Lying(MemoryStorage):
    def batch_delete(self, space, hashes):
        self.ensure_open()
        return [True] * len(hashes)

class Slow(MemoryStorage):
    def batch_set(self, space, hashes, pages):
        time.sleep(3600)

class {name}(StorageConformance):
    storage_class = {store}
    {extra}

    def config(self, scratch):
        return {{}}
"""
WAIVER = """
[[waiver]]
rule = "{rule}"
reason = "known"
link = "https://example.org/1"
until = 2999-01-01
"""


class Author:
    """The repository of a backend's author, with one test file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def writes(self, store: str = "MemoryStorage", extra: str = "", after: str = "") -> None:
        text = STORE.format(name="TestAcme", store=store, extra=extra) + after
        (self.folder / "test_acme.py").write_text(text)

    def runs(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)


@pytest.fixture
def author(tmp_path: Path) -> Author:
    return Author(tmp_path)


def test_a_broken_rule_fails_its_test_with_a_message_that_names_it(author: Author) -> None:
    author.writes(store="Lying")

    done = author.runs("-k", "kv_007")

    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "KV-007 Deleted is gone, and can be set again" in done.stdout
    assert "expected:" in done.stdout
    assert "batch_delete" in done.stdout


def test_a_report_is_written_for_each_class(author: Author) -> None:
    author.writes()

    done = author.runs("-k", "kv_001 or kv_401", "--hicache-report", "out", "--hicache-seed", "7")

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    result = json.loads((author.folder / "out" / "TestAcme" / "result.json").read_text())
    outcomes = {rule["id"]: rule["outcome"] for rule in result["rules"]}
    assert ("passed", "not_declared") == (outcomes["KV-001"], outcomes["KV-401"])
    assert result["run"]["seed"] == 7


def test_a_report_that_cannot_be_written_is_a_one_line_error(author: Author) -> None:
    author.writes()
    (author.folder / "out").write_text("a file")

    done = author.runs("-k", "kv_001", "--hicache-report", "out")

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "INTERNALERROR" not in done.stdout + done.stderr
    assert "out" in done.stdout + done.stderr


def test_a_check_that_a_time_limit_of_its_test_ends_is_unknown(author: Author) -> None:
    """A report without this check would show the rule as passed."""
    author.writes(store="Slow")

    done = author.runs(
        "-k", "kv_002_what_was_set_is_there", "--timeout", "1", "--hicache-report", "out"
    )

    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    result = json.loads((author.folder / "out" / "TestAcme" / "result.json").read_text())
    outcomes = {rule["id"]: rule["outcome"] for rule in result["rules"]}
    assert "unknown" == outcomes["KV-002"]


def test_a_waived_rule_is_an_expected_failure(author: Author) -> None:
    author.writes(store="Lying", extra='waivers = "waivers.toml"')
    (author.folder / "waivers.toml").write_text(WAIVER.format(rule="KV-007"))

    done = author.runs("-k", "kv_007", "-rx")

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "waived until 2999-01-01: known (https://example.org/1)" in done.stdout


@pytest.mark.parametrize(
    "change",
    [
        "def test_kv_001_a_fresh_key_space_is_empty(self): pass",
        "test_kv_001_a_fresh_key_space_is_empty = None",
    ],
)
def test_an_overridden_test_of_the_kit_is_an_error(author: Author, change: str) -> None:
    author.writes(extra=change)

    done = author.runs("-k", "kv_001")

    assert done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    assert "overrides or removes test_kv_001" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "change",
    [
        "TestAcme.test_kv_001_a_fresh_key_space_is_empty = lambda self: None",
        "del TestAcme.test_kv_001_a_fresh_key_space_is_empty",
    ],
)
def test_a_test_that_was_changed_afterwards_is_an_error(author: Author, change: str) -> None:
    author.writes(after=change)

    done = author.runs()

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "overrides or removes test_kv_001" in done.stdout + done.stderr


def test_a_mark_is_no_waiver(author: Author) -> None:
    author.writes(
        after="import pytest\npytest.mark.skip(TestAcme.test_kv_001_a_fresh_key_space_is_empty)"
    )

    done = author.runs()

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "is marked skip" in done.stdout + done.stderr


def test_a_mark_on_one_class_does_not_reach_another() -> None:
    from hicache_backends.memory import MemoryStorage
    from hicache_conformance import StorageConformance

    class First(StorageConformance):
        storage_class = MemoryStorage

    class Second(StorageConformance):
        storage_class = MemoryStorage

    name = next(name for name in dir(First) if name.startswith("test_kv_001"))
    pytest.mark.slow(getattr(First, name))

    assert not hasattr(getattr(Second, name), "pytestmark")


def test_a_class_that_is_skipped_altogether_is_not_green(author: Author) -> None:
    author.writes(after="import pytest\npytestmark = pytest.mark.skip('no server')")

    done = author.runs()

    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "MemoryStorage: inconclusive" in done.stdout


OTHER = """
class TestOther(StorageConformance):
    storage_class = MemoryStorage

    def config(self, scratch):
        return {}
"""
WORKERS = ("-n", "2", "--dist", "loadscope")


def test_workers_of_xdist_judge_and_report_the_classes_that_they_ran(author: Author) -> None:
    author.writes(after=OTHER)

    done = author.runs(*WORKERS, "-k", "kv_001 or kv_401", "--hicache-report", "out")

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert [1, 1] == [done.stdout.count(f"({name}): ") for name in ("TestAcme", "TestOther")]
    result = json.loads((author.folder / "out" / "TestOther" / "result.json").read_text())
    assert result["run"]["command"].endswith("loadscope -k 'kv_001 or kv_401' --hicache-report out")


def test_a_class_that_is_skipped_in_a_worker_is_not_green(author: Author) -> None:
    author.writes(after="import pytest\npytestmark = pytest.mark.skip('no server')")

    done = author.runs(*WORKERS)

    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "MemoryStorage: inconclusive" in done.stdout


def test_a_class_that_several_workers_ran_has_no_verdict(author: Author) -> None:
    author.writes()

    done = author.runs("-n", "2", "--dist", "load", "-k", "kv_001", "--hicache-report", "out")

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "no verdict, because several processes ran its tests" in done.stdout
    assert not (author.folder / "out").exists()


def test_the_plugin_imports_nothing_but_pytest_and_the_standard_library() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules); import hicache_conformance.plugin;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "['hicache_conformance']"


def test_the_warnings_of_a_store_are_few(author: Author) -> None:
    author.writes(
        extra="""
    class storage_class(MemoryStorage):
        def batch_exists(self, space, hashes):
            import warnings
            for number in range(1000):
                warnings.warn_explicit(f"unclosed {number}", ResourceWarning, "acme.py", number)
            return super().batch_exists(space, hashes)
"""
    )

    done = author.runs("-k", "kv_00", "-W", "default", "--hicache-quick")

    assert 1 <= done.stdout.count("ResourceWarning: unclosed") <= 5


def test_a_run_without_the_kits_tests_is_left_alone(author: Author) -> None:
    (author.folder / "test_other.py").write_text("def test_other(): pass\n")

    done = author.runs()

    assert done.returncode == pytest.ExitCode.OK
    assert "conformant" not in done.stdout


def test_several_classes_of_one_storage_have_different_names(author: Author) -> None:
    author.writes(after=STORE.format(name="TestOther", store="MemoryStorage", extra=""))

    done = author.runs("-k", "kv_001")

    assert "MemoryStorage (TestAcme): incomplete" in done.stdout
    assert "MemoryStorage (TestOther): incomplete" in done.stdout


@pytest.mark.parametrize(
    "chosen",
    [
        ["-k", "kv_001"],
        ["test_acme.py::TestAcme::test_kv_001_a_fresh_key_space_is_empty"],
        ["-k", "kv_001 or kv_101", "-x"],
    ],
)
def test_a_run_of_some_checks_is_called_conformant_nowhere(
    author: Author, chosen: list[str]
) -> None:
    author.writes()

    done = author.runs(*chosen, "--hicache-report", "out")

    files = (author.folder / "out" / "TestAcme").iterdir()
    texts = {path.name: path.read_text() for path in files} | {"terminal": done.stdout}
    said = {name for name, text in texts.items() if re.search(r"(?<!-)\bconformant\b", text)}
    assert len(texts) == 5
    assert said == set()


def test_a_rule_of_which_a_check_was_deselected_is_not_passed(author: Author) -> None:
    author.writes()

    author.runs("-k", "kv_001", "--hicache-report", "out")
    whole = json.loads((author.folder / "out" / "TestAcme" / "result.json").read_text())
    some = min(check["name"].partition(":")[2] for check in whole["rules"][0]["checks"])
    author.runs("-k", f"kv_001 and not {some}", "--hicache-report", "out")
    part = json.loads((author.folder / "out" / "TestAcme" / "result.json").read_text())

    assert ("passed", "partly") == (whole["rules"][0]["outcome"], part["rules"][0]["outcome"])
    assert [f"KV-001:{some}"] == part["rules"][0]["left_out"]


def test_a_report_has_the_version_the_facts_and_the_config_of_the_store(author: Author) -> None:
    author.writes(
        extra="""
    class storage_class(MemoryStorage):
        def diagnose(self):
            from hicache_storage.storage import Diagnosis
            yield Diagnosis("server", "Acme 7")
""",
        after="\n__version__ = '2.1'\n",
    )

    author.runs("-k", "kv_001", "--hicache-report", "out")

    result = json.loads((author.folder / "out" / "TestAcme" / "result.json").read_text())
    subject = result["subject"]
    assert ("test_acme 2.1", {"server": "Acme 7"}) == (subject["version"], subject["facts"])
