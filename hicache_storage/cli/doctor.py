"""`hicache doctor`: open a store as an engine would, and say what is wrong and how to fix it."""

from __future__ import annotations

from functools import partial
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
    from collections.abc import Iterator, Sequence

    from hicache_storage.cli.operations.diagnosis import Check

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
        help="number of pages to write, read and delete (default: %(default)s)",
    )
    add_model_argument(parser)
    add("--page-bytes", type=size, metavar="BYTES", help="the size of a page, instead of --model")
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
    from hicache_storage.cli.operations.probe import probe  # noqa: PLC0415

    page_tokens = choice.page_tokens or DEFAULT_PAGE_TOKENS
    page_nbytes = arguments.page_bytes or model_page_nbytes(arguments.model, page_tokens)
    yield from diagnosis.machine_checks()
    try:
        try:
            looked = _looked(choice, arguments.pages, page_nbytes)
        except NoSuchStore as error:
            if _has_files(choice.config.get("path")):
                raise NoSuchStore(
                    f"{error}. The directory holds other files, so doctor makes no store there"
                ) from None
            looked = []
        yield from looked
        if any(check.topic == "write" for check in looked):
            return
        with open_store(choice) as storage:
            asked = Answering.of(storage)
            pages = arguments.pages
            if not looked:
                pages = diagnosis.pages_with_room(storage, pages, page_nbytes)
                yield diagnosis.Check(
                    "open",
                    diagnosis.Status.NOTE,
                    "there was no store, so doctor made one",
                    "if there should have been one, correct the config",
                )
                yield from diagnosis.path_checks(choice, storage)
                yield from diagnosis.store_checks(asked, storage.diagnose())
            try_pages = partial(
                probe, pages=pages, page_nbytes=page_nbytes, page_tokens=page_tokens
            )
            yield from diagnosis.probe_checks(try_pages(storage), choice)
            for name, part in asked.parts.items():
                yield from diagnosis.part_proof_checks(name, try_pages(part))
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


def _looked(choice: config.StorageChoice, pages: int, page_nbytes: int) -> list[Check]:
    """Return the checks that need no write. One named "write" says why `doctor` must not write."""
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
        reason = diagnosis.why_not_to_write(checks, said, look, pages * page_nbytes)
        if reason:
            checks.append(diagnosis.Check("write", diagnosis.Status.NOTE, f"not tried: {reason}"))
            if not asked.failed:
                checks += diagnosis.proof_checks(prove(look, pages), choice)
            for name, part in asked.parts.items():
                checks += diagnosis.part_proof_checks(name, prove(part, pages))
    return checks


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
