"""Shared parts of the project's commands: verbs, one-line error messages, exit codes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from hicache_storage.errors import ConfigError, HiCacheError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_INTERRUPTED = 130


class Verb(Protocol):
    """The interface of a verb's module."""

    __name__: str

    @property
    def SUMMARY(self) -> str: ...  # noqa: N802 - a constant of the module
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command line of verbs. `--help` raises SystemExit, as in argparse."""

    name: str
    description: str
    verbs: tuple[Verb, ...]
    default: Verb | None = None
    """Verb of a command line that names no verb."""
    wrong_input: int = 2
    """Exit code of invalid input, which also prints one line on stderr."""

    def main(self, argv: Sequence[str]) -> int:
        """Run one verb and return its exit code."""
        try:
            arguments = self._parse(argv)
            code: int = arguments.run(arguments)
            sys.stdout.flush()
        except HiCacheError as error:
            self._print_error(str(error))
            return self.wrong_input
        except KeyboardInterrupt:
            self._print_error("interrupted")
            return _INTERRUPTED
        except BrokenPipeError:  # the reader of stdout has closed it, which is no failure of ours
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return code

    def _parse(self, argv: Sequence[str]) -> argparse.Namespace:
        names = [_name(verb) for verb in self.verbs]
        if self.default is not None and (not argv or argv[0] not in names):
            return self._checked(self._default_parser(self.default), argv, self.name)
        parser = Parser(prog=self.name, description=self.description, allow_abbrev=False)
        _add_version(parser)
        choices = parser.add_subparsers(metavar="VERB", required=True)
        for verb in self.verbs:
            subparser = choices.add_parser(
                _name(verb), help=verb.SUMMARY, description=verb.SUMMARY, allow_abbrev=False
            )
            verb.add_arguments(subparser)
            subparser.set_defaults(run=verb.run, parser=subparser)
        return self._checked(parser, argv, f"{self.name} {argv[0] if argv else ''}".strip())

    def _default_parser(self, default: Verb) -> argparse.ArgumentParser:
        verbs = "\n".join(f"  {_name(verb):10} {verb.SUMMARY}" for verb in self.verbs)
        parser = Parser(
            prog=self.name,
            description=self.description,
            epilog=f"other verbs (details: `{self.name} VERB --help`):\n{verbs}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _add_version(parser)
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

    def _print_error(self, message: str) -> None:
        sys.stderr.write(f"{self.name}: {' '.join(message.split())}\n")


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError, so that `Program.main` prints every error in the same way."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


class _PrintVersion(argparse.Action):
    """A flag that prints the version of the installed distribution, which is looked up then only."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from hicache_storage import __version__  # noqa: PLC0415 - keeps other commands fast

        sys.stdout.write(f"{parser.prog} {__version__}\n")
        parser.exit()


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", nargs=0, action=_PrintVersion, help="print the version")


def _name(verb: Verb) -> str:
    return verb.__name__.rpartition(".")[2]


def add_cwd_to_path(backend: str, config: Mapping[str, Any]) -> None:
    """Let the backend `dynamic` load a module of the working directory.

    An installed command, unlike `python -m`, does not search that directory. A module that can already
    be imported keeps its origin.
    """
    from hicache_storage.registry import DYNAMIC  # noqa: PLC0415 - keeps `--help` fast

    cwd, module_path = str(Path.cwd()), config.get("module_path")
    if backend != DYNAMIC or not isinstance(module_path, str) or cwd in sys.path:
        return
    package = module_path.partition(".")[0]
    if package.isidentifier() and importlib.util.find_spec(package) is None:
        sys.path.append(cwd)
