"""What the project's commands share: verbs, one-line complaints, exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from hicache_storage.errors import ConfigError, HiCacheError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

_INTERRUPTED = 130


class Verb(Protocol):
    """A module of a command: one verb."""

    __name__: str

    @property
    def SUMMARY(self) -> str: ...  # noqa: N802 - a constant of the module
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command line of verbs. `--help` leaves with SystemExit, as argparse does."""

    name: str
    description: str
    verbs: tuple[Verb, ...]
    default: Verb | None = None
    """The verb of a command line that names none."""
    wrong_input: int = 2
    """Exit code where the input is wrong, with one line on stderr."""

    def main(self, argv: Sequence[str]) -> int:
        """Run one verb; its exit code."""
        try:
            arguments = self._parse(argv)
            code: int = arguments.run(arguments)
            sys.stdout.flush()
        except HiCacheError as error:
            self._complain(str(error))
            return self.wrong_input
        except KeyboardInterrupt:
            self._complain("interrupted")
            return _INTERRUPTED
        except BrokenPipeError:  # the reader of our output left: not our failure, not worth a word
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return code

    def _parse(self, argv: Sequence[str]) -> argparse.Namespace:
        names = [_name(verb) for verb in self.verbs]
        if self.default is not None and (not argv or argv[0] not in names):
            return self._checked(self._default_parser(self.default), argv, self.name)
        parser = _Parser(prog=self.name, description=self.description, allow_abbrev=False)
        choices = parser.add_subparsers(metavar="VERB", required=True)
        for verb in self.verbs:
            below = choices.add_parser(
                _name(verb), help=verb.SUMMARY, description=verb.SUMMARY, allow_abbrev=False
            )
            verb.add_arguments(below)
            below.set_defaults(run=verb.run, parser=below)
        return self._checked(parser, argv, f"{self.name} {argv[0] if argv else ''}".strip())

    def _default_parser(self, default: Verb) -> argparse.ArgumentParser:
        verbs = "\n".join(f"  {_name(verb):10} {verb.SUMMARY}" for verb in self.verbs)
        parser = _Parser(
            prog=self.name,
            description=self.description,
            epilog=f"other verbs (`{self.name} VERB --help` tells more):\n{verbs}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        default.add_arguments(parser)
        parser.set_defaults(run=default.run, parser=parser)
        return parser

    def _checked(
        self, parser: argparse.ArgumentParser, argv: Sequence[str], command: str
    ) -> argparse.Namespace:
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            actions = arguments.parser._actions  # noqa: SLF001 - argparse has no public list
            flags = [flag for action in actions for flag in action.option_strings]
            hint = did_you_mean(unknown[0].partition("=")[0], flags)
            raise ConfigError(
                f"unknown argument {unknown[0]!r}{hint if '?' in hint else ''} (see {command} --help)"
            )
        return arguments

    def _complain(self, message: str) -> None:
        sys.stderr.write(f"{self.name}: {' '.join(message.split())}\n")


class _Parser(argparse.ArgumentParser):
    """Complains with an exception, so that every complaint is one line and leaves by one door."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _name(verb: Verb) -> str:
    return verb.__name__.rpartition(".")[2]
