"""The pytest plugin: options, the guard over the kit's tests, and the verdict at the end of a run.

The plugin is loaded in every pytest run of an environment that has the kit, so that it imports nothing
but pytest and the standard library until a test of the kit is collected. Under pytest-xdist there is no
verdict, because a verdict needs one process that has seen all tests.
"""

from __future__ import annotations

import datetime as dt
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from hicache_conformance.run import CHECK_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_conformance.author import StorageConformance
    from hicache_conformance.report.record import Record


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("hicache", "conformance of KV-cache storage backends").addoption
    add("--hicache-seed", type=int, default=0, help="of the conformance checks")
    add("--hicache-quick", action="store_true", help="leave out conformance checks that take long")
    add(
        "--hicache-strict",
        action="store_true",
        help="fail where a conformance rule could not be verified",
    )
    add("--hicache-report", metavar="DIR", help="write a conformance report, a folder a test class")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Conformance(config), "hicache-conformance-verdicts")


class _Conformance:
    """The kit's tests in one pytest run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started_s = time.time()
        self.classes: dict[str, type[StorageConformance]] = {}
        """By the node id of the class, as is everything here."""
        self.checks: dict[str, list[str]] = {}
        self.records: list[tuple[str, Record]] = []
        """By the name of the test class: several may be of one storage."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        ours = [item for item in items if self._meets(item)]
        left_out = [item for item in ours if not _check_of(item).quick]
        if left_out and config.option.hicache_quick:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]

    def _meets(self, item: pytest.Item) -> bool:
        """Return True for a test of the kit. Raise for one whose verdict would not be the kit's."""
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
        if report.when == "call":
            for name, value in report.user_properties:
                if name == CHECK_PROPERTY:
                    self.checks.setdefault(_class_of(report.nodeid), []).append(str(value))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.option.collectonly:
            return
        chosen: dict[str, set[str]] = {}
        for item in session.items:
            if _check_of(item) is not None:
                chosen.setdefault(_class_of(item.nodeid), set()).add(_check_of(item).name)
        for name, checks in chosen.items():
            cls = self.classes[name]
            record = self._judged(cls, self.checks.get(name, []))
            self.records.append((cls.__name__, record))
            self._write(record, cls.__name__)
            if self._fails(record, checks) and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _write(self, record: Record, name: str) -> None:
        """Write the report of a test class, where the command line has a directory."""
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
        """Return True if the verdict fails a run whose tests all passed: an empty run may not pass."""
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
            command=shlex.join(["pytest", *sys.argv[1:]]),
        )
        records = [CheckRecord.model_validate_json(text) for text in checks]
        tried = {record.name.partition(":")[0] for record in records}
        rules = [rule for rule in selected() if not tried or rule.id in tried]
        return make_record(facts, rules, records, cls.known_violations())

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        storages = [record.subject.name for _, record in self.records]
        if self.config.option.hicache_report and getattr(self.config.option, "numprocesses", None):
            terminalreporter.write_line(
                "hicache: no verdict and no report, because no process of pytest-xdist sees all tests:"
                " leave -n out"
            )
        for name, record in self.records:
            storage = record.subject.name
            shown = f"{storage} ({name})" if storages.count(storage) > 1 else storage
            for line in _lines(record, shown):
                terminalreporter.write_line(line)


def _check_of(item: pytest.Item) -> Any:
    """Return the check that an item runs, or None for a test that is not the kit's."""
    return getattr(getattr(item, "function", None), "hicache_check", None)


def _lines(record: Record, name: str) -> Iterator[str]:
    from hicache_conformance.report.wording import limits, tally, verdict_words  # noqa: PLC0415

    counts = record.counts()
    took = f"{record.run.elapsed_s:.0f} s"
    yield f"{name}: {verdict_words(record.verdict, counts)} ({tally(counts)}; {took})"
    for line in [*record.reasons, *limits(record)]:
        yield f"  {line}"


def _class_of(nodeid: str) -> str:
    return nodeid.rpartition("::")[0]


def _refuse_changes(cls: type[StorageConformance]) -> None:
    from hicache_conformance.author import check_overrides  # noqa: PLC0415
    from hicache_storage.errors import ConfigError  # noqa: PLC0415

    try:
        check_overrides(cls)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error
