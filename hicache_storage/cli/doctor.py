"""`hicache doctor`: open a store as an engine would, and say what is wrong and how to fix it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_storage import config
from hicache_storage.cli.escapes import escaped
from hicache_storage.cli.page_sizes import (
    DEFAULT_PAGE_TOKENS,
    add_model_argument,
    model_page_nbytes,
)
from hicache_storage.cli.printing import output_console, print_json, print_lines
from hicache_storage.cli.sizes import size
from hicache_storage.cli.stores import (
    add_evict_argument,
    add_store_arguments,
    open_existing_store,
    open_store,
    store_choice,
)
from hicache_storage.errors import (
    HiCacheError,
    NoSuchStore,
    StorageTimeout,
    StorageUnavailable,
    shown,
)
from hicache_storage.text_tables import text_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_storage.cli.operations.answering import Answering
    from hicache_storage.cli.operations.diagnosis import Check
    from hicache_storage.cli.operations.free_space import Trial

SUMMARY = "Open a store as an engine would, and say what is wrong and what to do."

_FOUND = 1
_PAGES = 8
_MOST_PAGES = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add = parser.add_argument
    add(
        "--pages",
        type=config.int_up_to(_MOST_PAGES),
        default=_PAGES,
        metavar="N",
        help="number of pages to write, read and delete (default: %(default)s); fewer, or a smaller"
        " one, if no more fit",
    )
    add_model_argument(parser)
    add("--page-bytes", type=size, metavar="BYTES", help="the size of a page, instead of --model")
    add_evict_argument(parser)
    add("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the checks. Return 1 if one of them found a problem, otherwise 0."""
    from hicache_storage.cli.operations.diagnosis import Check, Status, worst  # noqa: PLC0415 - `--help` stays fast

    checks: list[Check] = []
    backend, error = None, None
    try:
        choice = store_choice(arguments)
        backend = shown(choice.backend)
        for check in _checks(arguments, choice):
            checks.append(check)  # noqa: PERF402 - those before an error count
    except HiCacheError as failed:  # the arguments are wrong, but print the earlier checks
        error = failed
        checks.append(Check("open", Status.PROBLEM, str(error)))
    status = worst(checks)
    if arguments.json:
        fields = [check.as_json() for check in checks]
        print_json({"backend": backend, "status": status.value, "checks": fields})
    elif len(checks) > 1:
        _print(checks if error is None else checks[:-1])  # the error follows on stderr
    if error is not None:
        raise error
    return _FOUND if status is Status.PROBLEM else 0


def _checks(arguments: argparse.Namespace, choice: config.StorageChoice) -> Iterator[Check]:
    """Yield the checks of a store. Write to the store only if no earlier check forbids it."""
    from hicache_storage.cli.operations import diagnosis  # noqa: PLC0415
    from hicache_storage.cli.operations.answering import Answering  # noqa: PLC0415
    from hicache_storage.cli.operations.free_space import Trial  # noqa: PLC0415
    from hicache_storage.cli.operations.probe import probe  # noqa: PLC0415

    page_tokens = choice.page_tokens or DEFAULT_PAGE_TOKENS
    page_nbytes = arguments.page_bytes or model_page_nbytes(arguments.model, page_tokens)
    yield from diagnosis.machine_checks()
    try:
        wanted = Trial(arguments.pages, page_nbytes)
        trials = None
        try:
            looked, trials = _looked(choice, wanted, evicts=arguments.evict)
        except NoSuchStore as error:
            if _has_files(choice.config.get("path")):
                raise NoSuchStore(
                    f"{error}. The directory holds other files, so doctor makes no store there"
                ) from None
            looked = []
        yield from looked
        if trials is not None and not any(trials.values()):
            return
        with open_store(choice) as storage:
            asked = Answering.of(storage)
            if trials is None:
                yield diagnosis.Check(
                    "open",
                    diagnosis.Status.NOTE,
                    "there was no store, so doctor made one",
                    "if there should have been one, correct the config",
                )
                yield from diagnosis.path_checks(choice, storage)
                yield from diagnosis.store_checks(asked, storage.diagnose())
                trials = _trials(choice, asked, wanted, evicts=arguments.evict)
                yield from _untried(trials)
            for name, part in {"": storage, **asked.parts}.items():
                trial = trials[name]
                if trial is None:
                    continue
                measured = probe(part, **asdict(trial), page_tokens=page_tokens)
                measured.is_reduced = trial != wanted
                if name:
                    yield from diagnosis.part_proof_checks(name, measured)
                else:
                    yield from diagnosis.probe_checks(measured, choice)
    except (StorageUnavailable, StorageTimeout) as error:
        yield diagnosis.opening_problem(error)


def _has_files(path: object) -> bool:
    """Return True for a directory that has files, apart from those that a file system makes itself."""
    if not isinstance(path, str):
        return False
    try:
        entries = Path(path).expanduser().iterdir()
        return any(entry.name != "lost+found" for entry in entries)
    except (OSError, RuntimeError):
        return False


def _looked(
    choice: config.StorageChoice, wanted: Trial, *, evicts: bool
) -> tuple[list[Check], dict[str, Trial | None]]:
    """Return the checks that need no write, and what may be written, as `_trials` does."""
    from hicache_storage.cli.operations import diagnosis  # noqa: PLC0415
    from hicache_storage.cli.operations.answering import Answering  # noqa: PLC0415
    from hicache_storage.cli.operations.probe import prove  # noqa: PLC0415

    with open_existing_store(choice) as look:
        said, asked = look.diagnose(), Answering.of(look)
        checks = [
            diagnosis.Check("open", diagnosis.Status.OK, f"{choice.backend} answers"),
            *diagnosis.part_checks(asked),
            *diagnosis.path_checks(choice, look),
            *diagnosis.store_checks(asked, said),
        ]
        if any(check.status is diagnosis.Status.PROBLEM for check in checks):
            trials: dict[str, Trial | None] = dict.fromkeys(["", *asked.parts])
            checks.append(diagnosis.no_trial("solve the problems above first"))
        else:
            trials = _trials(choice, asked, wanted, evicts=evicts)
            checks += _untried(trials)
        if trials[""] is None and not asked.failed:
            checks += diagnosis.proof_checks(prove(look, wanted.pages), choice)
        for name, part in asked.parts.items():
            if trials[""] is None or trials[name] is None:
                checks += diagnosis.part_proof_checks(name, prove(part, wanted.pages))
    return checks, trials


def _trials(
    choice: config.StorageChoice, asked: Answering, wanted: Trial, *, evicts: bool
) -> dict[str, Trial | None]:
    """Return what may be written to the whole store ("") and to each of its parts. None: nothing."""
    from hicache_storage.cli.operations.free_space import free_nbytes  # noqa: PLC0415

    if evicts:
        return dict.fromkeys(["", *asked.parts], wanted)
    free = free_nbytes(choice, asked.whole)
    least = min(free.values())
    stores = {"": asked.whole, **asked.parts}
    return {
        name: wanted.within(free.get(name, least) if name else least, part.capabilities.alignment)
        for name, part in stores.items()
    }


def _untried(trials: Mapping[str, Trial | None]) -> Iterator[Check]:
    """Yield why no page is written to a store, for the whole and each part."""
    from hicache_storage.cli.operations import diagnosis  # noqa: PLC0415

    full = [name for name, trial in trials.items() if name and trial is None]
    why = "full, or hides its free space, and could evict or refuse pages"
    if trials[""] is None:
        yield diagnosis.no_trial(f"{' and '.join(full) or 'the store'} is {why}")
    for name in full:
        yield diagnosis.no_trial(f"it is {why}").about(name)


def _print(checks: Sequence[Check]) -> None:
    rows = [
        (
            check.topic,
            check.status.value,
            escaped(check.fact) + f"\n-> {check.advice}" * bool(check.advice),
        )
        for check in checks
    ]
    table = text_table(("check", "result", "fact, and what to do"), rows, "llL")
    print_lines(output_console(), [table])
