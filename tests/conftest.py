"""Fixtures of all tests, and plugins for tests that run in a pytest of their own.

Engines live in environments of their own, and native code may end its process. A test starts such a
pytest with the fixture `run_elsewhere`. The reports of its tests count in this run, and the summary
shows the kit's verdicts from there.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from repeats import Repeats
from short_summary import KIT, ShortSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from servers import RedisServer

ROOT = Path(__file__).parents[1]
VARIABLE = "HICACHE_TEST_REPORTS"
"""The variable that names the file to which the inner pytest writes its reports."""
REPORTS = "reports from elsewhere"
"""The property in which a test passes these reports to the process that prints the summary."""
SLOW = (
    "tests/conformance/selftest/",
    "tests/fuzz/",
    "tests/native/test_fuzz.py",
    "tests/storm/",
    "tests/test_interleavings.py",
)
"""Short forms of runs that take hours before a release. `make test` leaves them to `.ci/run`."""
LONGEST = (
    "tests/test_elsewhere.py",
    "tests/serving/",
    "tests/conformance/selftest/",
    "tests/conformance/checks/",
    "tests/conformance/test_compositions.py",
    "tests/test_interleavings.py",
    "tests/storm/",
)
"""The tests that come first, so that no worker starts a long one at the end."""
OTHERS = ("tests/backends/", "tests/conformance/")
"""Tests whose coverage of the SDK does not count."""
_SHOWN = 6000


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Repeats())
    path = os.environ.pop(VARIABLE, "")
    if path:
        config.pluginmanager.register(_Below(config, Path(path)))
    elif not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Above(config))
        config.pluginmanager.register(ShortSummary())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    covering = config.pluginmanager.hasplugin("pytest_cov")
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if covering and item.nodeid.startswith(OTHERS):
            item.add_marker(pytest.mark.no_cover)
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    places = (at for at, path in enumerate(LONGEST) if item.nodeid.startswith(path))
    return next(places, len(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let garbage collections pass over the tests and modules, because they never become garbage.

    Otherwise a full collection takes half a second of a processor, and up to three seconds on a busy
    machine. All threads of the process wait for its end: also a call that must end in time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


class _Below:
    """The plugin of the inner pytest. It writes its reports and the kit's verdicts to a file."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config = config
        self.path = path

    def _write(self, **line: Any) -> None:
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line, default=str) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        self._write(report=hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_sessionfinish(self) -> None:
        kit: Any = self.config.pluginmanager.get_plugin(KIT)
        if kit is not None:
            self._write(verdicts=[dataclasses.asdict(one) for one in kit.verdicts])


class _Above:
    """The plugin of the outer pytest. It hands the reports of inner pytests to all other plugins."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.session: pytest.Session

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        for line in [str(each) for key, each in report.user_properties if key == REPORTS]:
            data: dict[str, Any] = json.loads(line)
            if "report" in data:
                self._pass_on(data["report"])
            else:
                kit: Any = self.config.pluginmanager.get_plugin(KIT)
                kit.take(data["verdicts"])

    def _pass_on(self, data: dict[str, Any]) -> None:
        longrepr: Any = data["longrepr"]
        if isinstance(longrepr, list):  # JSON has no tuples: this is of a skipped test
            data["longrepr"] = (*longrepr,)
        hook = self.config.hook
        report = hook.pytest_report_from_serializable(config=self.config, data=data)
        self.session.testscollected += report.when == "setup"  # the progress is a share of it
        hook.pytest_runtest_logreport(report=report)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield a Redis that the tests of a process share. Each test uses a prefix of its own."""
    from servers import RedisServer

    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function after whose call the disk does not give this file any more."""
    real, bad = os.open, set[str]()

    def opening(path: Any, *args: Any, **options: Any) -> int:
        if str(path) in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", opening)
    return lambda path: bad.add(str(path))


@pytest.fixture
def run_elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs pytest in another process, by this Python or another.

    A failure in that process fails the run by its report. If the process crashes, this test fails.
    """

    def run(python: Path, *arguments: str) -> None:
        if not python.exists():
            message = f"there is no {python}: `make environments` makes it"
            if os.environ.get("CI"):
                pytest.fail(message)
            pytest.skip(message)
        path = tmp_path / "reports"
        path.touch()
        variables = {key: os.environ[key] for key in os.environ if not key.startswith("PYTEST_")}
        process = subprocess.Popen(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=ROOT,
            env={**variables, VARIABLE: str(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate()
        finally:
            if process.poll() is None:  # the time limit of this test
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            lines = path.read_text(encoding="utf-8").splitlines()
            request.node.user_properties.extend((REPORTS, line) for line in lines)
        failed = any('"outcome": "failed"' in line or '"fails": true' in line for line in lines)
        assert process.returncode == (1 if failed else 0), output[-_SHOWN:]

    return run
