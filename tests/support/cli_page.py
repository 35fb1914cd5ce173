"""The page docs/cli-reference.md, generated from the parsers of both commands.

make cli-page
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from hicache_conformance.cli.verbs import HICACHE_CONFORMANCE

from hicache_storage.cli.program import Program, Verb
from hicache_storage.cli.verbs import HICACHE

PROGRAMS = (HICACHE, HICACHE_CONFORMANCE)


def page() -> str:
    """Return docs/cli-reference.md."""
    lines = [
        "# Command-line reference",
        "",
        "Written by `make cli-page` from the parsers; `--help` shows the same, `--version` the version.",
        "[Commands for operators](cli.md) says what the verbs are for.",
        "",
        "A verb with `--hicache-storage-backend` accepts the other flags of HiCache, too, so that you",
        "can paste those of an engine. Every verb of `hicache` also has `--quiet`, which prints",
        "only errors on stderr, and `--log-format json`, which prints each message there as JSON.",
        "",
    ]
    for program in PROGRAMS:
        lines += _program(program)
    return "\n".join(lines[:-1]) + "\n"


def _program(program: Program) -> Iterator[str]:
    yield from (f"## `{program.name}`", "", program.description, "")
    for verb in program.verbs:
        yield from _verb(program, verb)


def _verb(program: Program, verb: Verb) -> Iterator[str]:
    name = f"{program.name} {verb.__name__.rpartition('.')[2]}"
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    verb.add_arguments(parser)
    yield from (f"### `{name}`", "", verb.SUMMARY, "")
    for group in parser._action_groups:
        shown = [one for one in group._group_actions if one.help is not argparse.SUPPRESS]
        if shown:
            title = "" if group.title in {"options", "positional arguments"} else group.title
            yield from (f"| {title or 'argument'} | |", "|---|---|")
            yield from (f"| {_call(parser, one)} | {_help(parser, one)} |" for one in shown)
            yield ""


def _call(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return an argument as it is typed. For a choice of words, return `WORD`: `_help` lists them."""
    value = "" if action.nargs == 0 else _value(parser, action)
    names = action.option_strings or [""]
    return ", ".join(_code(f"{name} {value}".strip()) for name in names)


def _value(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    if action.choices is not None and action.metavar is None:
        return "WORD"
    return formatter._format_args(action, action.dest.upper())


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    choices = action.choices if action.choices is not None and action.metavar is None else ()
    words = ", ".join(_code(str(choice)) for choice in choices)
    required = "required" if action.required and action.option_strings else ""
    return "; ".join(filter(None, (_cell(text), words, required)))


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    sys.stdout.write(page())
