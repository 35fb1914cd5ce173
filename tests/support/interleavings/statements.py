"""Adds a point before each statement of the code under test, so that a thread can be switched there."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast
from unittest import mock

import hicache_backends.striped
import hicache_backends.tiered

import hicache_storage.backend_support
import hicache_storage.composition
import hicache_storage.controller
import hicache_storage.handoff
import hicache_storage.host_pool
import hicache_storage.integrations
import hicache_storage.page_store
from interleavings.patching import Patches

_PACKAGES = (
    hicache_backends.striped,
    hicache_backends.tiered,
    hicache_storage.backend_support,
    hicache_storage.composition,
    hicache_storage.controller,
    hicache_storage.handoff,
    hicache_storage.host_pool,
    hicache_storage.integrations,
    hicache_storage.page_store,
)
_MODULES = (
    "hicache_storage.slot_allocator",
    "hicache_backends.memory.storage",
    "hicache_backends.file.eviction",
)
# Modules of other threads, processes and engines, and code that checks and storages of scenarios
# use.
_LEFT_OUT = frozenset({"torch_consensus", "memory", "memory_limits", "tiles", "shape", "frame"})
# Its lock belongs to the operating system, because a dataclass binds its default at its import.
_UNTOUCHED = frozenset({"Reservation.close"})
_POINT = "__interleavings_point__"


@contextmanager
def with_points(patches: Patches) -> Generator[int]:
    """Add points before statements during the `with` block. Yield the number of functions."""

    def point() -> None:
        scheduler = patches.scheduler()
        if scheduler is not None:
            scheduler.point("is before this statement")

    count = 0
    with ExitStack() as stack:
        for module in _modules():
            codes = _codes_with_points(module)
            stack.enter_context(mock.patch.object(module, _POINT, point, create=True))
            for function in _functions(module):
                old = function.__code__
                new = codes.get(old.co_qualname)
                if new is not None and new.co_freevars == old.co_freevars:
                    stack.callback(setattr, function, "__code__", old)
                    function.__code__ = new
                    count += 1
        yield count


def _modules() -> Iterator[ModuleType]:
    for package in _PACKAGES:
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not info.ispkg and info.name.rpartition(".")[2] not in _LEFT_OUT:
                yield importlib.import_module(info.name)
    for name in _MODULES:
        yield importlib.import_module(name)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions and methods that a module defines, also those behind decorators."""
    scopes: list[Any] = [module]
    scopes += [
        each
        for each in vars(module).values()
        if inspect.isclass(each) and each.__module__ == module.__name__
    ]
    for scope in scopes:
        for value in list(scope.__dict__.values()):
            function = _undecorated(value)
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                yield function


def _undecorated(value: Any) -> Any:
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)  # of a class method or a static one
    value = getattr(value, "func", value)  # of a cached property
    return inspect.unwrap(value) if callable(value) else value


def _codes_with_points(module: ModuleType) -> dict[str, CodeType]:
    """Return the code of each function of a module, with points, by its qualified name."""
    path = inspect.getfile(module)
    tree = _Points().visit(ast.parse(inspect.getsource(module), path))
    codes: dict[str, CodeType] = {}
    waiting = [compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)]
    while waiting:
        for constant in waiting.pop().co_consts:
            if inspect.iscode(constant):
                codes[constant.co_qualname] = constant
                waiting.append(constant)
    return {name: code for name, code in codes.items() if name not in _UNTOUCHED}


class _Points(ast.NodeTransformer):
    """A transformer that puts a point before each statement of each function."""

    def __init__(self) -> None:
        self._in_function = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self._in_function += 1
        self.generic_visit(node)
        self._in_function -= 1
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if self._in_function:
            for field in ("body", "orelse", "finalbody"):
                statements: Any = getattr(node, field, None)
                if isinstance(statements, list) and not isinstance(node, ast.ClassDef):
                    setattr(node, field, list(_interleaved(cast("list[ast.stmt]", statements))))
        return node


def _interleaved(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        if not isinstance(statement, (ast.Global, ast.Nonlocal)) and not _is_text(statement):
            call = ast.Call(ast.Name(_POINT, ast.Load()), [], [])
            yield ast.copy_location(ast.Expr(call), statement)
        yield statement


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
