"""Imports between packages follow the architecture: there is no cycle, and arrows point down."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCES = {
    "hicache_storage": ROOT,
    "hicache_backends": ROOT / "backends",
    "hicache_conformance": ROOT / "conformance",
}
CONTRACT = {f"hicache_storage.{name}" for name in ("errors", "keys", "page", "storage", "settings")}
SUPPORT = "hicache_storage.backend_support"
NATIVE = "hicache_storage.native"
WRAPPERS = {"encrypted"}
"""Backends that keep their pages in another backend, which they open by its name."""
COMPOSITIONS = {"striped", "tiered"}
"""Backends that keep their pages in several others, and check pages on their way between them."""
FOR_COMPOSITIONS = ("hicache_storage.composition", "hicache_storage.page_store")
REGISTRY = "hicache_storage.registry"
BACKENDS = sorted(path.parent.name for path in ROOT.glob("backends/hicache_backends/*/storage.py"))
CACHE = ("host_pool", "device_pool", "controller", "handoff")
ENTRANCES = ("replay", "planning", "integrations", "cli")

FORBIDDEN = [
    ("hicache_storage", ("hicache_backends", "hicache_conformance")),
    ("hicache_backends", ("hicache_conformance",)),
    *(
        (f"hicache_storage.{package}", tuple(f"hicache_storage.{upper}" for upper in upper_ones))
        for package, upper_ones in {
            "native": ("backend_support", "registry", "page_store", *CACHE, *ENTRANCES),
            "backend_support": ("registry", "page_store", "composition", *CACHE, *ENTRANCES),
            "page_store": ("registry", "request_log", "composition", *CACHE, *ENTRANCES),
            "composition": ("request_log", *CACHE, *ENTRANCES),
            "request_log": ("registry", *CACHE, *ENTRANCES),
            "host_pool": ("registry", "controller", "handoff", *ENTRANCES),
            "device_pool": ("registry", "controller", "handoff", *ENTRANCES),
            "controller": ("registry", "handoff", *ENTRANCES),
            "handoff": ("registry", *ENTRANCES),
            "integrations": ("replay", "planning", "cli"),
            "replay": ("planning", "integrations", "cli"),
            "planning": ("registry", "page_store.store", "controller", "integrations", "cli"),
            "report_page": ("registry", "page_store", *CACHE, *ENTRANCES),
            "markup": ("registry", "page_store", *CACHE, *ENTRANCES),
        }.items()
    ),
]
"""For each package, the packages that it must not import, not even in a function or for types."""


class Import(NamedTuple):
    """An import of one module of the project by another."""

    importer: str
    imported: str
    kind: str
    """`run-time`, `type-checking`, or `function` for an import inside one."""


@cache
def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for package, folder in SOURCES.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> list[Import]:
    return [
        Import(name, imported, kind)
        for name, path in modules().items()
        for imported, kind in _imported(ast.parse(path.read_text(encoding="utf-8")), "run-time")
        if imported != name
    ]


def _imported(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((name, kind) for alias in child.names for name in _ours(alias.name))
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                module = f"{child.module}.{alias.name}"
                yield from ((name, kind) for name in _ours(module))
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _imported(child, "function")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for each in child.body:
                yield from _imported(ast.Module([each], []), "type-checking")
            for each in child.orelse:
                yield from _imported(ast.Module([each], []), kind)
        else:
            yield from _imported(child, kind)


def _ours(name: str) -> list[str]:
    """Return the longest prefix of a dotted name that is a module of the project."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return [name] if name else []


def circles(kinds: set[str]) -> list[list[str]]:
    """Return the sets of modules that import each other directly or indirectly (Tarjan's components)."""
    arrows: dict[str, list[str]] = {name: [] for name in modules()}
    for each in imports():
        if each.kind in kinds:
            arrows[each.importer] += [each.imported, *_packages_of(each)]
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for imported in arrows[name]:
            if imported not in number:
                visit(imported)
            if imported in stack:
                lowest[name] = min(lowest[name], lowest[imported])
        if lowest[name] == number[name]:
            place = stack.index(name)
            found.append(sorted(stack[place:]))
            del stack[place:]

    for name in arrows:
        if name not in number:
            visit(name)
    return [circle for circle in found if len(circle) > 1]


def _packages_of(each: Import) -> Iterator[str]:
    """Yield the packages whose `__init__` also runs because the import comes from outside of them."""
    package = each.imported.rpartition(".")[0]
    while package and not within(each.importer, package):
        yield package
        package = package.rpartition(".")[0]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_no_modules_import_each_other_at_run_time() -> None:
    assert [] == circles({"run-time"})


def test_no_modules_import_each_other_inside_functions() -> None:
    assert [] == circles({"run-time", "function"})


def test_no_modules_import_each_other_for_type_checkers() -> None:
    assert [] == circles({"run-time", "type-checking"})


@pytest.mark.parametrize(("package", "above"), FORBIDDEN, ids=[package for package, _ in FORBIDDEN])
def test_arrows_point_down_only(package: str, above: tuple[str, ...]) -> None:
    assert [] == [
        each
        for each in imports()
        if within(each.importer, package) and any(within(each.imported, upper) for upper in above)
    ]


def test_the_contract_imports_only_itself_and_checks_of_values() -> None:
    allowed = CONTRACT | {"hicache_storage.scalars", "hicache_storage.durations"}

    assert [] == [
        each for each in imports() if each.importer in CONTRACT and each.imported not in allowed
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_imports_only_the_contract_and_what_backends_share(backend: str) -> None:
    own = f"hicache_backends.{backend}"

    assert [] == [
        each
        for each in imports()
        if within(each.importer, own)
        and each.imported not in CONTRACT
        and not within(each.imported, SUPPORT)
        and not within(each.imported, NATIVE)
        and not within(each.imported, own)
        and not (backend in WRAPPERS and each.imported == REGISTRY)
        and not (
            backend in COMPOSITIONS
            and any(within(each.imported, package) for package in FOR_COMPOSITIONS)
        )
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_package_of_a_backend_is_named_only_by_itself_and_the_registry(backend: str) -> None:
    package = re.compile(rf"\bhicache_backends\.{backend}\b")

    assert {"hicache_storage.registry"} == {
        name
        for name, path in modules().items()
        if not within(name, f"hicache_backends.{backend}")
        and package.search(path.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("backend", sorted({*BACKENDS} - {"file", "memory"}))
def test_the_sdk_treats_no_backend_by_its_name(backend: str) -> None:
    known = {
        "hicache_storage.registry",
        "hicache_storage.replay.job",
    }  # the job warns of Redis's clock

    assert (
        set()
        == {
            name
            for name, path in modules().items()
            if within(name, "hicache_storage")
            and any(
                isinstance(node, ast.Constant) and node.value == backend
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            )
        }
        - known
    )


def test_imports_of_each_kind_are_found() -> None:
    source = (
        "import hicache_storage.errors\n"
        "if TYPE_CHECKING:\n    from hicache_storage import keys\n"
        "class C:\n    def f(self):\n        from hicache_storage.page import Page\n"
    )

    assert [
        ("hicache_storage.errors", "run-time"),
        ("hicache_storage.keys", "type-checking"),
        ("hicache_storage.page", "function"),
    ] == list(_imported(ast.parse(source), "run-time"))
