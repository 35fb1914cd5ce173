"""Collects everything that a store shows to people: messages, `repr`, logs, warnings and prints."""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
import warnings
from typing import TYPE_CHECKING, Any

from hicache_conformance.scenarios.lifecycle_actors import use

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from hicache_conformance.case.probe import Probe
    from hicache_conformance.tools.processes.child import Link
    from hicache_storage.keys import KeySpace

Outputs = dict[str, str]
"""The text that a store has shown, by where it showed it."""


def collect_outputs(
    link: Link, space: KeySpace, wrong_configs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Actor: open, use, misuse, close and wrongly configure the store, and send all that it shows.

    `wrong_configs` has configs that can't be opened, by what is wrong with them. The actor needs a
    process of its own, because it takes all logs and prints.
    """
    assert link.reference is not None
    storage_class = link.reference.load()
    outputs: Outputs = {}
    with _captured_outputs(outputs):
        try:
            probe = link.open()
        except Exception as error:  # noqa: BLE001 - its text is collected
            outputs["the exception of from_config"] = chain_text(error)
        else:
            _use_store(probe, space, outputs)
        for what, config in wrong_configs.items():
            try:
                with storage_class.from_config(config) as storage:
                    storage.batch_exists(space, ["0" * 64])
            except Exception as error:  # noqa: BLE001 - its text is collected
                outputs[f"the exception with {what}"] = chain_text(error)
    link.send(outputs)


def chain_text(error: BaseException) -> str:
    """Return an exception as a log shows it, with causes and notes, and as `repr` shows it."""
    lines = traceback.format_exception(error)
    return "".join([*lines, repr(error), repr(error.args)])


def _use_store(probe: Probe, space: KeySpace, outputs: Outputs) -> None:
    storage = probe.storage
    outputs["repr(storage)"] = f"{storage!r} {storage} {type(storage)!r}"
    try:
        use(probe, space)
        outputs["repr(storage.stats())"] = repr(storage.stats())
    except Exception as error:  # noqa: BLE001 - its text is collected
        outputs["an exception of a call"] = chain_text(error)
    outputs["repr(storage) after use"] = f"{storage!r} {storage.capabilities!r}"
    misuses: dict[str, Callable[[], object]] = {
        "close": storage.close,
        "a call after close": lambda: storage.batch_exists(space, ["0" * 64]),
    }
    for what, misuse in misuses.items():
        try:
            misuse()
        except Exception as error:  # noqa: BLE001 - its text is collected
            outputs[f"the exception of {what}"] = chain_text(error)
    outputs["repr(storage) after close"] = repr(storage)


@contextlib.contextmanager
def _captured_outputs(outputs: Outputs) -> Generator[None, None, None]:
    """Capture the log records of all loggers, the warnings and the prints."""
    log, printed = _RecordTexts(), io.StringIO()
    logging.root.addHandler(log)
    logging.root.setLevel(logging.DEBUG)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)
            logger.propagate = True
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        yield
    outputs["a log record"] = "\n".join(log.lines)
    outputs["what was printed"] = printed.getvalue()
    outputs["a warning"] = "\n".join(str(one.message) for one in warned)


class _RecordTexts(logging.Handler):
    """A handler that keeps every record as text, with its exception."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {self.format(record)}")
