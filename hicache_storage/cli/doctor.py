"""`hicache doctor`: open a store as an engine would, and say what is wrong and what to do."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from hicache_storage import config
from hicache_storage.cli.page_sizes import (
    DEFAULT_PAGE_TOKENS,
    add_model_argument,
    model_page_nbytes,
)
from hicache_storage.cli.sizes import size
from hicache_storage.cli.stores import add_store_arguments, open_store, store_choice
from hicache_storage.errors import StorageTimeout, StorageUnavailable

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
        help="pages to write, read and delete (default: %(default)s)",
    )
    add_model_argument(parser)
    add("--page-bytes", type=size, metavar="BYTES", help="the size of a page, instead of --model")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the checks. Return 1 if one of them found a problem, else 0."""
    choice = store_choice(arguments)
    from hicache_storage.cli.operations.diagnosis import Status, worst  # noqa: PLC0415 - wrong flags fail fast

    checks = list(_checks(arguments, choice))
    status = worst(checks)
    if arguments.json:
        document = {
            "backend": choice.backend,
            "status": status.value,
            "checks": [check.as_json() for check in checks],
        }
        json.dump(document, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _print(checks)
    return _FOUND if status is Status.PROBLEM else 0


def _checks(arguments: argparse.Namespace, choice: config.StorageChoice) -> Iterator[Check]:
    from hicache_storage.cli.operations import diagnosis  # noqa: PLC0415
    from hicache_storage.cli.operations.probe import probe  # noqa: PLC0415

    yield from diagnosis.machine_checks()
    page_tokens = choice.page_tokens or DEFAULT_PAGE_TOKENS
    page_nbytes = arguments.page_bytes or model_page_nbytes(arguments.model, page_tokens)
    try:
        with open_store(choice) as storage:
            yield diagnosis.Check("open", diagnosis.Status.OK, f"{choice.backend} answers")
            yield from diagnosis.path_checks(choice, storage)
            yield from diagnosis.store_checks(storage)
            measured = probe(
                storage, pages=arguments.pages, page_nbytes=page_nbytes, page_tokens=page_tokens
            )
            yield from diagnosis.probe_checks(measured, choice)
    except (StorageUnavailable, StorageTimeout) as error:
        yield diagnosis.Check(
            "open",
            diagnosis.Status.PROBLEM,
            str(error),
            "start the store, or correct its address; an engine would run without L3 until then",
        )


def _print(checks: Sequence[Check]) -> None:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from hicache_storage.cli.printing import output_console, print_lines  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("fact, and what to do", overflow="fold")
    for check in checks:
        advice = f"\n-> {check.advice}" if check.advice else ""
        table.add_row(check.topic, check.status.value, f"{check.fact}{advice}")
    print_lines(output_console(), [table])
