"""The pytest plugin: it adds options, protects the kit's tests, and prints the verdict after a run.

pytest loads the plugin in every run of an environment that has the kit. So it imports only pytest
and the standard library until a test of the kit is collected. A verdict needs one process that has
run all tests of a class. Under pytest-xdist each worker judges the classes that it has run, and the
process that prints the summary shows their verdicts. `--dist loadscope` keeps a class in one
worker.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from hicache_conformance.run import CHECK_PROPERTY

if TYPE_CHECKING:
    from hicache_conformance.author import StorageConformance
    from hicache_conformance.report.record import Record

_VERDICTS = "hicache-verdicts"
"""The key under which a worker of pytest-xdist sends its verdicts."""


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("hicache", "conformance of KV-cache storage backends").addoption
    add("--hicache-seed", type=int, default=0, help="seed of the conformance checks")
    add("--hicache-quick", action="store_true", help="leave out slow conformance checks")
    add(
        "--hicache-strict",
        action="store_true",
        help="fail if a conformance rule could not be verified",
    )
    add(
        "--hicache-report",
        metavar="DIR",
        help="write conformance reports, one folder for each test class",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Conformance(config), "hicache-conformance-verdicts")


class _Conformance:
    """The kit's tests in one pytest run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started_s = time.time()
        self.classes: dict[str, type[StorageConformance]] = {}
        """The test classes. All dicts of this object have the node id of a class as key."""
        self.checks: dict[str, list[str]] = {}
        self.ran: set[str] = set()
        """The node ids of the tests that this process has started."""
        self.verdicts: list[_Verdict] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        ours = [item for item in items if self._meets(item)]
        left_out = dict.fromkeys(item for item in ours if not _check_of(item).quick)
        if left_out and config.option.hicache_quick:
            config.hook.pytest_deselected(items=[*left_out])
            items[:] = [item for item in items if item not in left_out]

    def _meets(self, item: pytest.Item) -> bool:
        """Return True for a test of the kit. Raise if it was changed or marked as skipped."""
        if _check_of(item) is None:
            return False
        assert isinstance(item, pytest.Function)
        name = _class_of(item.nodeid)
        if name not in self.classes:
            assert item.cls is not None
            self.classes[name] = item.cls
            _refuse_changes(self.classes[name])
        own_marks: list[pytest.Mark] = getattr(item.obj, "pytestmark", [])
        marks = {mark.name for mark in own_marks}
        if marks & {"skip", "skipif", "xfail"}:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {', '.join(sorted(marks))}: a rule is waived in a"
                " waivers.toml, with a reason, a link and an end, never by a mark"
            )
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran.add(report.nodeid)
        if report.when == "call":
            for name, value in report.user_properties:
                if name == CHECK_PROPERTY:
                    self.checks.setdefault(_class_of(report.nodeid), []).append(str(value))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.option.collectonly:
            return
        here: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            if _check_of(item) is not None:
                here.setdefault(_class_of(item.nodeid), []).append(item)
        worker_output: dict[str, Any] | None = getattr(self.config, "workeroutput", None)
        for name, items in here.items():
            done = sum(item.nodeid in self.ran for item in items)
            if worker_output is None or done == len(items):
                self._judge(self.classes[name], name, {_check_of(item).name for item in items})
            elif done:
                self.verdicts.append(_Verdict.none(self.classes[name]))
        if worker_output is not None:
            worker_output[_VERDICTS] = [dataclasses.asdict(one) for one in self.verdicts]
        if any(one.fails for one in self.verdicts) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the verdicts of a worker of pytest-xdist. A worker that crashed has none."""
        output: dict[str, Any] = getattr(node, "workeroutput", {})
        self.take(output.get(_VERDICTS, []))

    def take(self, verdicts: list[dict[str, Any]]) -> None:
        """Add verdicts of another process, as `dataclasses.asdict` made them, to the summary."""
        self.verdicts += [_Verdict(**one) for one in verdicts]

    def _judge(self, cls: type[StorageConformance], name: str, chosen: set[str]) -> None:
        record = self._judged(cls, self.checks.get(name, []))
        self._write(record, cls.__name__)
        first, *more = _lines(record)
        self.verdicts.append(
            _Verdict(
                record.subject.name, cls.__name__, first, more, fails=self._fails(record, chosen)
            )
        )

    def _write(self, record: Record, name: str) -> None:
        """Write the report of a test class if the command line names a directory."""
        directory: str | None = self.config.option.hicache_report
        if not directory:
            return
        from hicache_conformance.report.write import write_report  # noqa: PLC0415
        from hicache_storage.errors import ConfigError  # noqa: PLC0415

        try:
            write_report(record, self.config.invocation_params.dir / directory / name)
        except ConfigError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)

    def _fails(self, record: Record, chosen: set[str]) -> bool:
        """Return True if the verdict makes the pytest run fail even if every test passed."""
        from hicache_conformance.checks import all_checks  # noqa: PLC0415

        if any(check.quick and check.name not in chosen for check in all_checks()):
            return False  # a run of a few tests needs no verdict
        strict: bool = self.config.option.hicache_strict
        return record.verdict in ("failed", "inconclusive") or (
            record.verdict == "partial" and strict
        )

    def _judged(self, cls: type[StorageConformance], checks: list[str]) -> Record:
        from hicache_conformance.author import description_of  # noqa: PLC0415
        from hicache_conformance.report.record import CheckRecord  # noqa: PLC0415
        from hicache_conformance.rules import selected  # noqa: PLC0415
        from hicache_conformance.run.verdict import RunFacts, make_record  # noqa: PLC0415

        told = description_of(cls)
        facts = RunFacts(
            name=cls.storage_class.__name__,
            storage_class=cls.storage_class,
            claims=told.claims if told else cls.storage_class.capabilities,
            absent=cls.absent,
            store_facts=told.facts if told else {},
            config=told.config if told else {},
            started_at=dt.datetime.fromtimestamp(self.started_s, dt.UTC),
            elapsed_s=time.time() - self.started_s,
            seed=self.config.option.hicache_seed,
            quick=self.config.option.hicache_quick,
            strict=self.config.option.hicache_strict,
            command=shlex.join(["pytest", *self._arguments()]),
        )
        records = [CheckRecord.model_validate_json(text) for text in checks]
        tried = {record.name.partition(":")[0] for record in records}
        rules = [rule for rule in selected() if not tried or rule.id in tried]
        return make_record(facts, rules, records, cls.known_violations())

    def _arguments(self) -> list[str]:
        """Return what the user has typed. A worker of pytest-xdist receives it from the main process."""
        worker_input: dict[str, Any] | None = getattr(self.config, "workerinput", None)
        typed: list[str] = sys.argv if worker_input is None else worker_input["mainargv"]
        return typed[1:]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        storages = [one.storage for one in self.verdicts]
        for one in self.verdicts:
            several = storages.count(one.storage) > 1
            shown = f"{one.storage} ({one.test_class})" if several else one.storage
            terminalreporter.write_line(f"{shown}: {one.line}")
            for line in one.more:
                terminalreporter.write_line(f"  {line}")


@dataclasses.dataclass
class _Verdict:
    """A line of the summary for a test class, as plain data, because workers send it."""

    storage: str
    test_class: str
    """The name of the test class, because several classes may test one storage."""
    line: str
    more: list[str]
    fails: bool

    @classmethod
    def none(cls, judged: type[StorageConformance]) -> _Verdict:
        line = "no verdict, because several processes ran its tests: use --dist loadscope"
        return cls(judged.storage_class.__name__, judged.__name__, line, [], fails=False)


def _check_of(item: pytest.Item) -> Any:
    """Return the check that an item runs, or None if the test is not the kit's."""
    return getattr(getattr(item, "function", None), "hicache_check", None)


def _lines(record: Record) -> list[str]:
    from hicache_conformance.report.wording import limits, tally, verdict_words  # noqa: PLC0415

    counts = record.counts()
    words = verdict_words(record.verdict, counts)
    took = f"{record.run.elapsed_s:.0f} s"
    return [f"{words} ({tally(counts)}; {took})", *record.reasons, *limits(record)]


def _class_of(nodeid: str) -> str:
    return nodeid.rpartition("::")[0]


def _refuse_changes(cls: type[StorageConformance]) -> None:
    from hicache_conformance.author import check_overrides  # noqa: PLC0415
    from hicache_storage.errors import ConfigError  # noqa: PLC0415

    try:
        check_overrides(cls)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error
