from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from hicache_storage import errors
from hicache_storage.errors import (
    BackendNotInstalled,
    ConfigError,
    CorruptPage,
    HiCacheError,
    NoSuchStore,
    StorageClosed,
    StorageTimeout,
    StorageUnavailable,
    UnknownBackend,
    UnsupportedOperation,
    did_you_mean,
)

BUILT_INS: dict[type[HiCacheError], type[Exception]] = {
    ConfigError: ValueError,
    NoSuchStore: ValueError,
    UnknownBackend: LookupError,
    BackendNotInstalled: ImportError,
    StorageUnavailable: ConnectionError,
    StorageTimeout: TimeoutError,
    StorageClosed: RuntimeError,
    UnsupportedOperation: Exception,
    CorruptPage: Exception,
}


def declared() -> Iterator[type[HiCacheError]]:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, HiCacheError):
            yield value


def test_every_error_is_in_the_list_above() -> None:
    assert {HiCacheError, *BUILT_INS} == set(declared())


@pytest.mark.parametrize("kind", BUILT_INS)
def test_an_error_is_ours_and_its_builtin(kind: type[HiCacheError]) -> None:
    """A caller can catch the error as the built-in class, without an import."""
    assert issubclass(kind, HiCacheError)
    assert issubclass(kind, BUILT_INS[kind])


@pytest.mark.parametrize("kind", BUILT_INS)
def test_every_error_stands_in_the_tree(kind: type[HiCacheError]) -> None:
    tree = errors.__doc__ or ""
    builtin = BUILT_INS[kind]

    line = next(line for line in tree.splitlines() if f"── {kind.__name__} " in line)
    assert builtin is Exception or f"{kind.__name__} ({builtin.__name__})" in line


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("redis: url: this field is required"),
        StorageTimeout("no answer in 2 s"),
        StorageUnavailable("refused"),
        BackendNotInstalled("pip install"),
        UnknownBackend("fiel", ["file", "memory"]),
        CorruptPage("wrong_key", "page ab holds cd"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_the_way_to_another_process(error: HiCacheError) -> None:
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - the test pickled it

    assert type(error) is type(again)
    assert str(error) == str(again)
    assert vars(error) == vars(again)


def test_an_unknown_backend_is_named_with_the_nearest() -> None:
    error = UnknownBackend("fiel", ["memory", "file"])

    assert "unknown storage backend 'fiel'; did you mean 'file'?" == str(error)


def test_a_corrupt_page_has_a_reason() -> None:
    error = CorruptPage("wrong_size", "page ab says it has 3 bytes")

    assert "wrong_size" == error.reason
    assert "wrong_size: page ab says it has 3 bytes" == str(error)


@pytest.mark.parametrize(
    ("name", "choices", "hint"),
    [
        ("reddis", ["memory", "redis"], "; did you mean 'redis'?"),
        ("zzz", ["memory", "redis"], "; choose one of memory, redis"),
        ("zzz", [], ""),
        ("", ["memory"], "; choose one of memory"),
    ],
)
def test_a_hint_is_the_nearest_choice_or_all(name: str, choices: list[str], hint: str) -> None:
    assert hint == did_you_mean(name, choices)


@pytest.mark.parametrize("kind", [StorageUnavailable, StorageTimeout, ConfigError])
def test_advice_survives_a_pickle(kind: type[HiCacheError]) -> None:
    error = kind("redis: refused", advice="start it")

    again: HiCacheError = pickle.loads(pickle.dumps(error))  # noqa: S301 - it is ours

    assert ("redis: refused", "start it") == (str(again), again.advice)


def test_the_fields_of_the_built_in_class_stay() -> None:
    assert BackendNotInstalled("no client", name="mooncake").name == "mooncake"
