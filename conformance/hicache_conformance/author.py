"""What a backend's author uses: every check of the kit as a pytest test of the author's own class."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from hicache_conformance.checks import Check, all_checks
from hicache_conformance.run import CHECK_PROPERTY
from hicache_conformance.run.description import StoreDescription, described_in_time
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check, unfinished_record
from hicache_conformance.run.subject import Subject
from hicache_conformance.run.waivers import Waiver, read_waivers
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.report.record import CheckRecord

_DESCRIPTIONS: dict[type[StorageConformance], StoreDescription | None] = {}
_SKIPPED = {Outcome.NOT_DECLARED, Outcome.NOT_VERIFIED, Outcome.UNKNOWN}


class StorageConformance(Subject):
    """The base of your test class: set `storage_class` and define `config(self, scratch)`.

    Each test has its own instance, so a back door may use what `config` received before. Fixtures
    and `setup_method` of the class work as in any other test class.
    """

    __test__ = False
    waivers: ClassVar[str | None] = None
    """The path of a `waivers.toml`, relative to the class's file. You may override tests of its
    rules.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__test__ = hasattr(cls, "storage_class")
        _refuse_overrides(cls)
        for check in all_checks():
            name = name_of_test(check)
            if not hasattr(cls, name) or _is_ours(getattr(cls, name), check):
                setattr(cls, name, _test_of(check))

    @classmethod
    def known_violations(cls) -> dict[str, Waiver]:
        """Return the waivers of the class, by rule."""
        if cls.waivers is None:
            return {}
        return read_waivers(Path(inspect.getfile(cls)).parent / cls.waivers)


def description_of(cls: type[StorageConformance]) -> StoreDescription | None:
    """Return what the store says about itself, or None until a check of the class has passed."""
    return _DESCRIPTIONS.get(cls)


def name_of_test(check: Check) -> str:
    """Return the name of the test for a check, such as `test_kv_002_what_was_set_is_read_back`."""
    return f"test_{check.rule.id.replace('-', '_').lower()}_{check.run.__name__}"


def check_overrides(cls: type[StorageConformance]) -> None:
    """Raise if a subclass has replaced or removed a test of the kit without a waiver for its rule.

    Raises:
        ConfigError: The message names the tests.
    """
    _refuse_overrides(cls, complete=True)


def _refuse_overrides(cls: type[StorageConformance], *, complete: bool = False) -> None:
    changed = [
        check
        for check in all_checks()
        if (complete or hasattr(cls, name_of_test(check)))
        and not _is_ours(getattr(cls, name_of_test(check), None), check)
    ]
    unknown = [check for check in changed if check.rule.id not in cls.known_violations()]
    if unknown:
        raise ConfigError(
            f"{cls.__qualname__} overrides or removes {name_of_test(unknown[0])}"
            f"{f' and {len(unknown) - 1} more' if unknown[1:] else ''}: the verdict would not be the"
            f" kit's. If {unknown[0].rule.id} can't be kept yet, waive it: give the class"
            ' `waivers = "waivers.toml"`'
        )


def _is_ours(found: Any, check: Check) -> bool:
    return getattr(found, "hicache_check", None) is check


def _test_of(check: Check) -> Callable[..., None]:
    """Return a test function for one class. Marks that pytest puts on it affect only that class."""

    def test(self: StorageConformance, request: pytest.FixtureRequest) -> None:
        options = RunOptions(
            seed=request.config.option.hicache_seed, quick=request.config.option.hicache_quick
        )
        try:
            record = run_check(lambda: copy.copy(self), check, options)
        except BaseException as error:  # such as the end of the test's time: the rule is broken
            record = unfinished_record(check, str(error))
            request.node.user_properties.append((CHECK_PROPERTY, record.model_dump_json()))
            raise
        request.node.user_properties.append((CHECK_PROPERTY, record.model_dump_json()))
        if record.outcome is Outcome.PASSED and type(self) not in _DESCRIPTIONS:
            _DESCRIPTIONS[type(self)] = described_in_time(copy.copy(self))
        _conclude(record, check, type(self).known_violations())

    test.__name__ = name_of_test(check)
    test.__qualname__ = f"StorageConformance.{test.__name__}"
    test.__doc__ = check.run.__doc__
    vars(test)["hicache_check"] = check
    return test


def _conclude(record: CheckRecord, check: Check, waivers: dict[str, Waiver]) -> None:
    """Report the outcome of a check to pytest."""
    __tracebackhide__ = True
    waiver = waivers.get(check.rule.id)
    if record.outcome in _SKIPPED:
        pytest.skip(f"{record.outcome.value}: {record.message}")
    if record.outcome is Outcome.FAILED:
        if waiver is not None and not waiver.has_ended():
            pytest.xfail(f"waived until {waiver.until}: {waiver.reason} ({waiver.link})")
        pytest.fail(failure_text(record, check), pytrace=False)
    if record.outcome is Outcome.ERROR:
        pytest.fail(f"the check could not run: {record.message}", pytrace=False)


def failure_text(record: CheckRecord, check: Check) -> str:
    """Return the text of a failed check: the rule, the expected and the actual answer, and the calls."""
    rule = check.rule
    lines = [f"{rule.id} {rule.title}", "", f"  {rule.statement}", "", record.message]
    lines += [f"expected: {record.expected}"] if record.expected else []
    lines += [f"came:     {record.got}"] if record.got else []
    lines += ["sequence:", *(f"  {line}" for line in record.sequence)] if record.sequence else []
    lines += ["", f"Users of such a store see: {rule.consequence}"]
    return "\n".join(lines)
