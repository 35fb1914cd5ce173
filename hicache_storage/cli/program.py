"""The base of the project's commands: verbs, one-line error messages, exit codes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from hicache_storage.cli.stderr_log import (
    StderrHandler,
    add_log_arguments,
    log_of,
    set_format,
)
from hicache_storage.errors import (
    ConfigError,
    HiCacheError,
    advice_about,
    did_you_mean,
    install_command,
    shown,
)
from hicache_storage.replay.warning_log import warnings_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.cli.stderr_log import StderrLog

_INTERRUPTED = 130
_SHELLS = ("bash", "zsh", "tcsh")
_CLOSED = (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))


class Verb(Protocol):
    """What the module of a verb must have."""

    __name__: str

    @property
    def SUMMARY(self) -> str: ...  # noqa: N802 - a constant of the module
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command line with verbs. `--help` raises SystemExit, as in argparse."""

    name: str
    description: str
    verbs: tuple[Verb, ...]
    default: Verb | None = None
    """The verb to run if the command line names none."""
    wrong_input: int = 2
    """The exit code for invalid input, which also prints one line on stderr."""
    has_log_flags: bool = False
    """True if every verb accepts `--quiet` and `--log-format`."""

    def main(self, argv: Sequence[str]) -> int:
        """Run one verb, and return its exit code."""
        _prepare_streams()
        with log_of(self.name) as log:
            return self._main(argv, log)

    def _main(self, argv: Sequence[str], log: StderrLog) -> int:
        code = 0
        try:
            try:
                with warnings_to(StderrHandler(log)):
                    code = self._run(argv, log)
            finally:
                sys.stdout.flush()
        except OSError as error:
            if not _gave_stdout_up():
                raise
            if not isinstance(error, BrokenPipeError):  # a reader may close the pipe at any time
                log.print_error(f"standard output cannot be written: {error.strerror}")
                return self.wrong_input
        return code

    def _run(self, argv: Sequence[str], log: StderrLog) -> int:
        try:
            arguments = self._parse(argv)
            set_format(arguments)
            code: int = arguments.run(arguments)
        except (HiCacheError, ImportError) as error:  # HICACHE_NATIVE may insist on what is missing
            text = ": ".join(filter(None, (str(error), advice_about(error))))
            log.print_error(_redacted(text, argv))
            return self.wrong_input
        except MemoryError:
            log.print_error("this machine does not have the memory: choose smaller or fewer pages")
            return self.wrong_input
        except KeyboardInterrupt:
            log.print_error("interrupted")
            return _INTERRUPTED
        return code

    def _parse(self, argv: Sequence[str]) -> argparse.Namespace:
        names = [_name(verb) for verb in self.verbs]
        if self.default is not None and (not argv or argv[0] not in names):
            return self._checked(self._default_parser(self.default), argv, self.name)
        parser = Parser(prog=self.name, description=self.description, allow_abbrev=False)
        self._add_program_flags(parser)
        self._add_verbs(parser, required=True)
        return self._checked(parser, argv, f"{self.name} {argv[0] if argv else ''}".strip())

    def _default_parser(self, default: Verb) -> Parser:
        verbs = "\n".join(f"  {_name(verb):10} {verb.SUMMARY}" for verb in self.verbs)
        parser = Parser(
            prog=self.name,
            description=self.description,
            epilog=f"other verbs (details: `{self.name} VERB --help`):\n{verbs}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._add_program_flags(parser)
        default.add_arguments(parser)
        parser.set_defaults(run=default.run, parser=parser)
        return parser

    def _add_verbs(
        self, parser: argparse.ArgumentParser, *, required: bool
    ) -> list[argparse.ArgumentParser]:
        """Add a parser for each verb, and return them."""
        choices = parser.add_subparsers(metavar="VERB", required=required)
        for verb in self.verbs:
            subparser = choices.add_parser(
                _name(verb), help=verb.SUMMARY, description=verb.SUMMARY, allow_abbrev=False
            )
            verb.add_arguments(subparser)
            if self.has_log_flags:
                add_log_arguments(subparser)
            subparser.set_defaults(run=verb.run, parser=subparser)
        return [*choices.choices.values()]

    def _add_program_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--version", nargs=0, action=_printing(self._version), help="print the version"
        )
        parser.add_argument(
            "--print-completion",
            choices=_SHELLS,
            action=_printing(self._completion),
            help="print a script that completes verbs and flags",
        )

    def _version(self, _: object) -> str:
        from hicache_storage import __version__, native  # noqa: PLC0415 - `--help` stays fast

        slow = f"data plane in Python: {native.reason}"
        plane = "compiled data plane" if native.implementation == "compiled" else slow
        return f"{self.name} {__version__} ({plane})"

    def _completion(self, shell: object) -> str:
        """Return a completion script for a shell.

        Raises:
            ConfigError: The library that makes the scripts is not installed.
        """
        try:
            import shtab  # noqa: PLC0415 - an extra
        except ImportError:
            raise ConfigError(
                f"--print-completion needs shtab: {install_command('completion')}"
            ) from None
        if self.default is None:
            parser: argparse.ArgumentParser = Parser(prog=self.name)
            self._add_program_flags(parser)
        else:
            parser = self._default_parser(self.default)
        for each in (parser, *self._add_verbs(parser, required=False)):
            _mark_files(each, shtab.FILE)
        return shtab.complete(parser, shell=str(shell))

    def _checked(self, parser: Parser, argv: Sequence[str], command: str) -> argparse.Namespace:
        arguments, unknown = parser.parse(argv)
        if unknown:
            actions = arguments.parser._actions  # noqa: SLF001 - argparse has no public list
            flags = [flag for action in actions for flag in action.option_strings]
            name = unknown[0].partition("=")[0]
            hint = did_you_mean(name, flags)
            raise ConfigError(
                f"unknown argument {shown(name)!r}{hint if '?' in hint else ''} (see {command} --help)"
            )
        return arguments


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError, so that `Program.main` prints every error in the same way."""

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the values of flags, and the unknown arguments.

        Raises:
            ConfigError: The message quotes no value that may be a secret, unlike argparse's own
                messages.
        """
        try:
            return self.parse_known_args(argv)
        except ConfigError as error:
            raise ConfigError(_redacted(str(error), argv)) from None

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help, and report an error if that fails. Argparse itself ignores the error."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _redacted(message: str, argv: Sequence[str]) -> str:
    """Remove arguments that may be secrets, or contain one, from a message that may quote them."""
    for text in argv:
        for value in {text, text.partition("=")[2]}:
            if shown(value) != value:
                message = message.replace(repr(value), repr(shown(value)))
                message = message.replace(value, shown(value))
    return message


def _prepare_streams() -> None:
    """Open the standard streams that the caller has closed. Writing on such a stdout is an error."""
    for name, mode, flags in _CLOSED:
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))
    stdout: Any = sys.stdout
    if hasattr(stdout, "reconfigure"):  # a name may have letters that its encoding lacks
        stdout.reconfigure(errors="backslashreplace")


def _gave_stdout_up() -> bool:
    """Return whether standard output accepts nothing any more. If so, discard the rest."""
    try:
        sys.stdout.write("\n")  # a failed write may have emptied the buffer
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _printing(text: Callable[[object], str]) -> type[argparse.Action]:
    """Return an argparse action that prints a text and ends the program, as `--help` does."""

    class Printing(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,  # noqa: ARG002 - argparse passes it
            values: object,
            option_string: str | None = None,  # noqa: ARG002 - as above
        ) -> None:
            sys.stdout.write(f"{text(values)}\n")
            parser.exit()

    return Printing


def _mark_files(parser: argparse.ArgumentParser, completer: object) -> None:
    """Let the shell complete file names after the flags that take one."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list
        if action.type is Path or action.metavar == "FILE":
            vars(action)["complete"] = completer


def _name(verb: Verb) -> str:
    return verb.__name__.rpartition(".")[2]


def add_cwd_to_path(backend: str, config: Mapping[str, Any]) -> None:
    """Let the backend `dynamic` load a module from the working directory.

    An installed command does not search that directory, but `python -m` does. A module that can
    already be imported is still imported from the same place.
    """
    from hicache_storage.registry import DYNAMIC  # noqa: PLC0415 - keeps `--help` fast

    cwd, module_path = str(Path.cwd()), config.get("module_path")
    if backend != DYNAMIC or not isinstance(module_path, str) or cwd in sys.path:
        return
    package = module_path.partition(".")[0]
    if package.isidentifier() and importlib.util.find_spec(package) is None:
        sys.path.append(cwd)
