"""Find which test kills which mutant of a module: comparisons, constants, dropped statements, answers.

All mutants of a module are compiled into it, each behind a switch, and the tests are collected once. A
run without a mutant shows which tests reach which mutants. Then, for each mutant, the tests that reach
it run in a fork of the process. Code that a test runs in other processes has no mutants.

    make kills MODULE=hicache_storage/planning
    python tests/support/kills.py hicache_storage/cli/gc.py --tests tests/cli/test_gc.py --every 3
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.abc
import importlib.util
import inspect
import json
import os
import select
import signal
import sys
import time
from collections import Counter, defaultdict
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

    import pytest

    Results: TypeAlias = Generator[tuple[str, dict[str, Any]]]

ROOT = Path(__file__).parents[2]
PYTEST = ("-q", "--assert=plain", "--tb=native", "-p", "no:cacheprovider", "-o", "timeout=0")
LEAST_S = 4.0
"""The least time limit of a test. A test that exceeds its limit hangs, which is a kill."""
ENOUGH = 6
"""After this many kills of a mutant, the rest of its tests are not run."""
QUICK_S = 0.15
"""Tests that take longer than this run only for mutants that no quicker test kills."""
SLOW_S = 2.0
"""Tests that take longer than this don't run."""

OPPOSITES: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
    ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break)
SKIPPED = (ast.pattern, ast.Import, ast.ImportFrom, ast.arg, ast.Global, ast.Nonlocal)


class Mutant(NamedTuple):
    """A change of one expression or statement in a function."""

    module: str
    line: int
    change: str


class Switch:
    """The switch of all mutants: which one is on, and which ones the code has reached."""

    active = -1

    def __init__(self) -> None:
        self.reached: set[int] = set()

    def __call__(self, number: int) -> bool:
        self.reached.add(number)
        return number == self.active


class Mutator(ast.NodeTransformer):
    """A transformer that adds each mutant beside the code that it changes, behind `__kill__(number)`."""

    def __init__(self, module: str, mutants: list[Mutant]) -> None:
        self._module, self._mutants = module, mutants
        self._in_function = False

    def visit(self, node: Any) -> Any:
        if isinstance(node, SKIPPED):
            return node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self._function(node)
        if not self._in_function:
            return self.generic_visit(node)
        return self._expression(node) if isinstance(node, ast.expr) else self._statement(node)

    def _expression(self, node: ast.expr) -> Any:
        if isinstance(node, ast.JoinedStr):
            return self._text(node)
        changed = _changed(node)
        return (
            self.generic_visit(node)
            if changed is None
            else self._either(node, changed, self.generic_visit)
        )

    def _statement(self, node: Any) -> Any:
        if isinstance(node, DROPPED) or (
            isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
        ):
            return self._dropped(node)
        if isinstance(node, ast.AnnAssign):
            node.value = node.value and self.visit(node.value)
        elif isinstance(node, ast.Return) and not isinstance(
            node.value, (ast.Constant, type(None))
        ):
            node.value = self._either(node.value, ast.Constant(None), self.visit)
        elif isinstance(node, (ast.If, ast.While)) and not _changed(node.test):
            node.test = self._either(
                node.test, ast.UnaryOp(ast.Not(), _copy(node.test)), self.visit
            )
            node.body, node.orelse = ([*map(self.visit, each)] for each in (node.body, node.orelse))
        else:
            return self.generic_visit(node)
        return node

    def _switch(self, node: Any, change: str) -> ast.expr:
        self._mutants.append(Mutant(self._module, node.lineno, change[:90]))
        return ast.Call(
            ast.Name("__kill__", ast.Load()), [ast.Constant(len(self._mutants) - 1)], []
        )

    def _either(self, node: ast.expr, changed: ast.expr, inside: Callable[[Any], Any]) -> ast.expr:
        """Return the expression `changed if __kill__(number) else node`, with mutants inside `node`."""
        switch = self._switch(node, f"{ast.unparse(node)} -> {ast.unparse(changed)}")
        return ast.IfExp(switch, changed, inside(node))

    def _text(self, node: ast.JoinedStr) -> ast.expr:
        switch = self._switch(node, f"{ast.unparse(node)} -> '~'")
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                part.value = self.visit(part.value)
        return ast.IfExp(switch, ast.Constant("~"), node)

    def _dropped(self, node: Any) -> Any:
        value = getattr(node, "value", None)
        if isinstance(value, (ast.Constant, ast.Yield, ast.YieldFrom)) and isinstance(
            node, ast.Expr
        ):
            return node
        switch = self._switch(node, f"without {ast.unparse(node)}")
        inner: Any = self.generic_visit(node)
        return ast.If(ast.UnaryOp(ast.Not(), switch), [inner], [])

    def _function(self, node: Any) -> Any:
        before, self._in_function = self._in_function, True
        node.body = [*map(self.visit, node.body)]
        self._in_function = before
        return node


def _changed(node: ast.expr) -> ast.expr | None:
    """Return a mutant of an expression, or None if it has none."""
    changed: Any = None
    if isinstance(node, ast.Compare):
        changed = ast.Compare(
            node.left, [OPPOSITES[type(node.ops[0])](), *node.ops[1:]], node.comparators
        )
    elif isinstance(node, ast.BoolOp):
        changed = ast.BoolOp(OPPOSITES[type(node.op)](), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPPOSITES:
        changed = ast.BinOp(node.left, OPPOSITES[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        changed = node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return ast.Constant(node.value * 2 or "~")
    return changed and _copy(changed)


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def mutate(source: str, module: str, path: str, mutants: list[Mutant]) -> CodeType:
    """Return the code of a module with its mutants, and append these to `mutants`."""
    tree = Mutator(module, mutants).visit(ast.parse(source))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder and loader that imports modules with their mutants."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.switch, self.mutants = Switch(), list[Mutant]()
        self._code: dict[str, tuple[Path, CodeType]] = {}
        for path in paths:
            parts = path.relative_to(_folder(path)).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self._code[name] = path, mutate(path.read_text("utf-8"), name, str(path), self.mutants)

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname not in self._code:
            return None
        place = self._code[fullname][0]
        folders = [str(place.parent)] if place.stem == "__init__" else None
        return importlib.util.spec_from_file_location(
            fullname, place, loader=self, submodule_search_locations=folders
        )

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__kill__"] = self.switch
        exec(self._code[module.__name__][1], module.__dict__)  # noqa: S102 - the project's own


def _folder(path: Path) -> Path:
    """Return the folder that a module is imported from."""
    own = {"hicache_backends": ROOT / "backends", "hicache_conformance": ROOT / "conformance"}
    return next((folder for name, folder in own.items() if name in path.parts), ROOT)


class Matrix:
    """A plugin for pytest that runs, for each mutant, the tests that reach it, in a fork."""

    def __init__(self, finder: Finder, every: int) -> None:
        self.mutants, self._switch = finder.mutants, finder.switch
        self.tried = range(0, len(self.mutants), every)
        self.items: dict[str, Any] = {}
        self.killed: dict[int, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = {}
        self._reached: dict[str, set[int]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for name, result in self._forked([*self.items], -1, 600.0):
            if result["passed"] and result["seconds"] < SLOW_S:
                self._seconds[name], self._reached[name] = result["seconds"], {*result["reached"]}
            else:
                sys.stderr.write(f"is slow, or fails without a mutant: {name}\n")
        begun_s = time.monotonic()
        for number in self.tried:
            self._try(number)
            if number % 50 == 0:
                took_s = time.monotonic() - begun_s
                sys.stderr.write(f"{number} of {len(self.mutants)}, {took_s:.0f} s\n")
        return True

    def _try(self, number: int) -> None:
        cases: Counter[str] = Counter()
        order: dict[str, tuple[bool, int]] = {}
        for name, reached in self._reached.items():
            if number in reached:  # the quick tests first, and one case of each function first
                cases[_function(name)] += 1
                order[name] = self._seconds[name] >= QUICK_S, cases[_function(name)]
        limit_s = LEAST_S + 5 * max((self._seconds[name] for name in order), default=0)
        with closing(
            self._forked(sorted(order, key=order.__getitem__), number, limit_s)
        ) as results:
            for name, result in results:
                if not result["passed"]:
                    self.killed[number].add(_function(name))
                enough = 1 if order[name][0] or "seconds" not in result else ENOUGH
                if len(self.killed[number]) >= enough:
                    break

    def _forked(self, names: list[str], number: int, limit_s: float) -> Results:
        """Yield each test with its result. If a test hangs, kill it and run the rest in a new fork."""
        while names:
            read, write = os.pipe()
            gc.freeze()
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)  # the servers that a test starts end with it
                self._switch.active = number
                try:
                    self._run([self.items[name] for name in names], write)
                finally:
                    os._exit(0)
            os.close(write)
            os.setpgid(pid, pid)
            done = 0
            try:
                for line in _lines(read, limit_s):
                    yield names[done], json.loads(line)
                    done += 1
            finally:
                os.close(read)
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if done < len(names):
                yield names[done], {"passed": False}
            names = names[done + 1 :]

    def _run(self, items: list[Any], write: int) -> None:
        from _pytest.runner import runtestprotocol

        pairs: Any = pairwise([*items, None])
        for item, following in pairs:
            self._switch.reached.clear()
            started_s = time.monotonic()
            reports = runtestprotocol(item, log=False, nextitem=following)
            result = {
                "passed": not any(each.failed for each in reports),
                "seconds": time.monotonic() - started_s,
                "reached": [] if self._switch.active >= 0 else [*self._switch.reached],
            }
            os.write(write, json.dumps(result).encode() + b"\n")


def _lines(pipe: int, limit_s: float) -> Iterator[bytes]:
    """Yield lines until the end, or until none comes for `limit_s`."""
    rest = b""
    while select.select([pipe], [], [], limit_s)[0]:
        more = os.read(pipe, 1 << 20)
        if not more:
            return
        *whole, rest = (rest + more).split(b"\n")
        yield from whole


def cover(kills: dict[str, set[int]], lines: dict[str, int]) -> list[str]:
    """Return few tests that together kill what all tests kill, picked by their kills per line."""
    chosen: list[str] = []
    left = set[int]().union(*kills.values())
    while left:
        chosen.append(max(sorted(kills), key=lambda test: len(kills[test] & left) / lines[test]))
        left -= kills[chosen[-1]]
    return chosen


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def report(matrix: Matrix) -> Iterator[str]:
    """Yield a line for each test function: its kills, its length, and whether the cover needs it."""
    lines = {
        _function(name): inspect.getsource(item.function).count("\n") + 2
        for name, item in matrix.items.items()
    }
    kills = {
        name: {number for number, names in matrix.killed.items() if name in names} for name in lines
    }
    chosen = cover(kills, lines)
    for name, found in kills.items():
        state = "cover" if name in chosen else "spare"
        yield f"{state} {len(found):5} kills {lines[name]:4} lines  {name}"
    for number in matrix.tried:
        if not matrix.killed[number]:
            yield "survives: {}:{} {}".format(*matrix.mutants[number])


def record(matrix: Matrix) -> dict[str, Any]:
    """Return for each module how many of its mutants were tried and killed, and in which files."""
    found: dict[str, Any] = {}
    for number in matrix.tried:
        name = matrix.mutants[number].module
        each = found.setdefault(name, {"mutants": 0, "killed": 0, "by": Counter()})
        each["mutants"] += 1
        each["killed"] += bool(matrix.killed[number])
        each["by"].update({test.partition("::")[0] for test in matrix.killed[number]})
    return found


def tests_of(path: Path) -> str:
    """Return where the tests of a module or package are."""
    first, *parts = path.resolve().relative_to(_folder(path)).with_suffix("").parts
    tests = ROOT / "tests" / first.removeprefix("hicache_").removeprefix("storage")
    above = [Path(*parts[:number]) for number in range(len(parts), 0, -1)]
    for place in (Path(*parts[:-1], f"test_{parts[-1]}.py"), *above):
        if (tests / place).exists():
            return str(tests / place)
    raise FileNotFoundError(f"{path} has no tests")


def run(module: Path, tests: Sequence[str] = (), every: int = 1) -> Matrix:
    """Run the tests of a module or package for one in `every` of its mutants."""
    import pytest

    finder = Finder([path.resolve() for path in sorted(module.rglob("*.py")) or [module]])
    sys.meta_path.insert(0, finder)
    matrix = Matrix(finder, every)
    pytest.main([*PYTEST, *(tests or [tests_of(module)])], plugins=[matrix])
    return matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", type=Path, help="a module or a package")
    parser.add_argument("--tests", nargs="+", default=[], help="default: the module's own")
    parser.add_argument("--every", type=int, default=1, help="try one of so many mutants")
    parser.add_argument("--record", type=Path, help="a file of records: note this one in it")
    options = parser.parse_args()
    matrix = run(options.module, options.tests, options.every)
    found = record(matrix)
    sys.stdout.writelines(f"{line}\n" for line in report(matrix))
    for name, each in found.items():
        sys.stdout.write(f"{name}: {each['killed']} of {each['mutants']}\n")
    if options.record:
        text = options.record.read_text("utf-8") if options.record.exists() else "{}"
        records: dict[str, Any] = json.loads(text)
        records[str(options.module)] = {"every": options.every, "modules": found}
        options.record.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
