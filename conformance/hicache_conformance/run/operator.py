"""What an operator uses: a deployed store, chosen as on an engine's command line."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from hicache_conformance.run.subject import Scratch, Subject
from hicache_storage.cli.program import add_cwd_to_path
from hicache_storage.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.storage import HiCacheStorage


class DeployedStore(Subject):
    """A backend by name. Each test replaces `{scratch}` and `{prefix}` in the strings of its config."""

    def __init__(self, storage_class: type[HiCacheStorage], template: Mapping[str, Any]) -> None:
        self.storage_class = storage_class  # type: ignore[misc]  # an author's class has it as a class
        self.absent = getattr(storage_class, "absent", {})  # type: ignore[misc]  # as above
        self._template = template

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return cast("dict[str, Any]", filled(dict(self._template), scratch))


def deployed_store(
    name: str, config: Mapping[str, Any]
) -> tuple[type[HiCacheStorage], Callable[[], DeployedStore]]:
    """Return the class of the backend `name`, and a function that makes a subject of it for each test.

    Raises:
        UnknownBackend, BackendNotInstalled, ConfigError: As `registry.resolve` raises them.
    """
    add_cwd_to_path(name, config)
    storage_class, template = resolve(name, config)
    return storage_class, functools.partial(DeployedStore, storage_class, template)


def filled(template: Any, scratch: Scratch) -> Any:
    """Return `template` with `{scratch}` and `{prefix}` replaced in all strings, nested ones too."""
    if isinstance(template, str):
        return template.replace("{scratch}", str(scratch.path)).replace("{prefix}", scratch.prefix)
    if isinstance(template, dict):
        fields = cast("dict[object, object]", template)
        return {key: filled(value, scratch) for key, value in fields.items()}
    if isinstance(template, list):
        items = cast("list[object]", template)
        return [filled(value, scratch) for value in items]
    return template
