"""A server that the tests of a class of the kit share, except those that stop it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

import pytest
from hicache_conformance.run.subject import Subject
from servers import ServerProcess

S = TypeVar("S", bound=ServerProcess)


class OnSharedServer(Subject, Generic[S]):
    """A base for such a class, beside `StorageConformance`. `running` is the server of a test."""

    server_class: ClassVar[type[ServerProcess]]
    directories: ClassVar[pytest.TempPathFactory]
    shared: ClassVar[Any]
    own: S | None = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
        cls.directories = tmp_path_factory
        with cls._new() as cls.shared:
            yield

    @property
    def running(self) -> S:
        return self.shared if self.own is None else self.own

    @contextmanager
    def server(self) -> Generator[S, None, None]:
        with self._new() as server:
            self.own = server
            yield server

    @classmethod
    def _new(cls) -> Any:
        return cls.server_class(cls.directories.mktemp("server"))
