"""`hicache`: the command line. One module a verb; nothing heavy is imported before a verb runs.

Exit codes: 0; 1 for a run that found corrupt pages; 2 for input that is wrong, with one line on stderr;
128 and the signal's number for a run that a signal ended.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from hicache_storage.cli import backends, replay
from hicache_storage.errors import ConfigError, HiCacheError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

_WRONG_INPUT = 2
_INTERRUPTED = 130
_VERBS = (backends, replay)


class _Parser(argparse.ArgumentParser):
    """Complains with an exception, so that every complaint is one line and leaves by one door."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; its exit code. `--help` leaves with SystemExit, as argparse does."""
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except HiCacheError as error:
        _complain(str(error))
        return _WRONG_INPUT
    except KeyboardInterrupt:
        _complain("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output left: not our failure, and not worth a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="hicache", description="KV-cache storage for LLM servers.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    flags: dict[str, list[str]] = {}
    for verb in _VERBS:
        name = verb.__name__.rpartition(".")[2]
        below = verbs.add_parser(
            name, help=verb.SUMMARY, description=verb.SUMMARY, allow_abbrev=False
        )
        verb.add_arguments(below)
        below.set_defaults(run=verb.run, verb=name)
        flags[name] = [flag for action in below._actions for flag in action.option_strings]  # noqa: SLF001 - argparse has no public list
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        hint = did_you_mean(unknown[0].partition("=")[0], flags[arguments.verb])
        raise ConfigError(
            f"unknown argument {unknown[0]!r}{hint if '?' in hint else ''}"
            f" (see hicache {arguments.verb} --help)"
        )
    return arguments


def _complain(message: str) -> None:
    sys.stderr.write(f"hicache: {' '.join(message.split())}\n")
