"""The LMCache adapter. Its base class is added later, so that this module does not import LMCache."""

from __future__ import annotations

import itertools
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, cast

from hicache_storage.errors import HiCacheError
from hicache_storage.integrations._metrics import AdapterMetrics, EngineRegistry
from hicache_storage.integrations.lmcache._attachment import Attachment
from hicache_storage.integrations.lmcache._identity import page_hash
from hicache_storage.integrations.lmcache._listing import list_objects
from hicache_storage.integrations.lmcache._object_layouts import UnknownLayoutError
from hicache_storage.integrations.lmcache._settings import AdapterSettings
from hicache_storage.integrations.lmcache._task_queues import TaskQueues
from hicache_storage.integrations.lmcache._tasks import Task, add_objects, groups_of
from hicache_storage.scalars import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.integrations.lmcache._attachment import Session
    from hicache_storage.integrations.lmcache._config import AdapterConfig
    from hicache_storage.integrations.lmcache._engine import (
        EngineTypes,
        LayoutDesc,
        MemoryDesc,
        MemoryObject,
        ObjectKey,
    )
    from hicache_storage.integrations.lmcache._tasks import Group, TaskQueue
    from hicache_storage.keys import KeySpace
    from hicache_storage.metrics import CacheView

logger = logging.getLogger(__name__)

_MAX_REFUSALS = 20
_ATTACH, _DETACH = "attach", "detach"
_SHOWN = ("backend", "metrics_port", "metrics_host")
"""Settings that the metrics depend on. An attach may change them."""


class Adapter:
    """An L2 adapter of LMCache's MP server that uses a storage of this project. Thread-safe.

    LMCache's store and prefetch controllers submit tasks, and wait for three eventfds. The methods that
    they call never block and never raise: if the store fails, a lookup or load is a miss, and a store is
    reported as failed. A task is reported only when nothing touches its objects any more.
    """

    engine: ClassVar[EngineTypes]

    def __init__(
        self,
        config: AdapterConfig | Mapping[str, Any],
        l1_memory_desc: MemoryDesc | None = None,
    ) -> None:
        """Open the store. LMCache passes a `HiCacheL2AdapterConfig` or the mapping `adapter_params`.

        Raises:
            ConfigError: A field is invalid; the message names it.
        """
        super().__init__(max_capacity_bytes=0)  # type: ignore[call-arg]  # LMCache's base class
        settings = getattr(config, "settings", None)
        if settings is None:
            settings = AdapterSettings.of(config)  # type: ignore[arg-type]  # it is a mapping
        self._settings: AdapterSettings = settings
        self._ids = itertools.count()
        self._queues = TaskQueues(self.engine, self._notify)
        self._refusals: dict[str, int] = {}
        self._attachment = Attachment(self.engine, l1_memory_desc, self._queues.finish)
        try:
            self._attachment.attach(settings)
        except BaseException:
            self._queues.close()
            raise
        self._metrics = self._new_metrics()

    # --- event descriptors ---------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._queues.stores.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._queues.lookups.event_fd

    def get_load_event_fd(self) -> int:
        return self._queues.loads.event_fd

    # --- tasks ---------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObject]) -> int:
        """Submit objects to store. Return the number of the task."""
        return self._submit(
            self._queues.stores,
            keys,
            lambda session: self._object_groups(session, keys, objects),
            lambda session, task_id, groups: session.runner.submit_store(
                task_id, [group.batch() for group in groups]
            ),
            self.engine.store_result(False, 0),
        )

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of the stores that have ended.

        A store succeeded if every object was stored, or `admission` kept it out of the store.
        """
        return self._queues.stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, LayoutDesc]
    ) -> int:
        """Submit a lookup that locks nothing, so a load may still miss.

        Return the number of the task.
        """
        return self._submit(
            self._queues.lookups,
            keys,
            lambda session: self._groups(
                session, keys, lambda n: session.layouts.of_lookup(keys[n], group_layout_descs)
            ),
            lambda session, task_id, groups: session.runner.submit_lookup(
                task_id, [(group.space, group.hashes) for group in groups]
            ),
            self.engine.bitmap(len(keys)),
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return once which objects the store has, or None until the task has ended."""
        return self._queues.lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing, because lookups lock nothing."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObject]) -> int:
        """Submit objects to load into. Return the number of the task."""
        return self._submit(
            self._queues.loads,
            keys,
            lambda session: self._object_groups(session, keys, objects),
            lambda session, task_id, groups: session.runner.submit_load(
                task_id, [group.batch() for group in groups]
            ),
            self.engine.bitmap(len(keys)),
        )

    def query_load_result(self, task_id: int) -> Any:
        """Return once which objects were loaded and verified, or None until the task has ended."""
        return self._queues.loads.take(task_id)

    # --- the rest of the interface -------------------------------------------------------------------

    def get_memory_tags(self) -> Any:
        """Return LMCache's tags for this store's medium, or None before 0.5.7, which has no tags."""
        return self.engine.memory_tags(self._settings.shared)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects in every layout that this adapter has seen.

        The call blocks up to a deadline.
        """
        session = self._attachment.session
        if session is None:
            logger.warning(
                "could not delete %s: the store is not open", counted(len(keys), "object")
            )
            return
        pages: dict[KeySpace, list[ObjectKey]] = {}
        for key in keys:
            for layout in session.layouts.of_key(key):
                pages.setdefault(session.identity.space(key, layout), []).append(key)
        for space, deleted in pages.items():
            if self._delete(session, space, deleted):
                self._notify("deleted", deleted, self._accounted(deleted, space.page_nbytes))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> Any:
        """List objects of any process that this adapter can load. The call blocks during a scan.

        Raises:
            NotImplementedError: The store cannot list its pages.
            ValueError: `page_size` or `cursor` is wrong.
            RuntimeError: The store is not open.
        """
        session = self._attachment.session
        if session is None:
            raise RuntimeError("the store is not open")
        if not session.store.storage.capabilities.enumerable:
            raise NotImplementedError(f"{self._settings.backend!r} does not list its pages")
        found, token = list_objects(
            session.store,
            session.identity,
            session.layouts.serde,
            model_name=model_name,
            page_size=page_size,
            cursor=cursor,
        )
        return self.engine.key_page(found, token)

    def report_status(self) -> dict[str, Any]:
        """Return the adapter's state and counters for LMCache's `GET /status`."""
        session = self._attachment.session
        status: dict[str, Any] = {
            "is_healthy": session is not None and session.store.breaker.state == "closed",
            "type": "HiCacheL2Adapter",
            "backend": self._settings.backend,
            "attached": session is not None,
            "failure": self._attachment.failure,
            "refusals": dict(self._refusals),
            "tasks": {
                "lookup": len(self._queues.lookups),
                "load": len(self._queues.loads),
                "store": len(self._queues.stores),
            },
        }
        if session is not None:
            breakers = session.store.breaker
            status["breaker"] = {"reads": breakers.reads.state, "writes": breakers.writes.state}
            status["pages"] = session.store.stats()
            status["jobs"] = session.runner.stats()
        return status

    def reconfigure_status(self) -> dict[str, Any]:
        """Return the answer to `GET /reconfigure/plugin/l2/status`."""
        return {
            "backend": "plugin",
            "supported_operations": [_ATTACH, _DETACH],
            "status": {"attached": self._attachment.session is not None},
        }

    def reconfigure(
        self, operation: str, payload: Mapping[str, Any], *, device_owners: object = None
    ) -> dict[str, Any]:
        """Attach or detach the store, for `POST /reconfigure/plugin/l2/OPERATION`.

        The fields of an attach replace those in `adapter_params`, for example {"revision": "step-2"}.

        Raises:
            L2ReconfigureError: The operation or a field is unknown.
        """
        if operation == _DETACH:
            self._attachment.detach()
            return {"attached": False}
        if operation != _ATTACH:
            raise self.engine.reconfigure_error(
                400, f"unknown operation {operation!r}: use attach or detach"
            )
        try:
            given = self._settings.model_dump(exclude_unset=True)
            settings = AdapterSettings.of({**given, **payload})
            self._attachment.attach(settings)
        except (HiCacheError, ValueError) as error:
            raise self.engine.reconfigure_error(400, str(error)) from error
        shown, self._settings = self._settings, settings
        if any(getattr(shown, name) != getattr(settings, name) for name in _SHOWN):
            self._metrics.close()
            self._metrics = self._new_metrics()
        return {"attached": self._attachment.session is not None}

    def close(self) -> None:
        """Close the store. Return when nothing touches LMCache's memory any more. Idempotent."""
        with ExitStack() as closing:
            closing.callback(self._queues.close)
            closing.callback(self._attachment.detach)
            closing.callback(self._metrics.close)

    # --- metrics -------------------------------------------------------------------------------------

    def _new_metrics(self) -> AdapterMetrics:
        """Publish the adapter's metrics among LMCache's own, and on `metrics_port`."""
        return AdapterMetrics(
            self._settings,
            self._view,
            engine="lmcache",
            backend=self._settings.backend,
            logger=logger,
            registry=EngineRegistry.DEFAULT,
        )

    def _view(self) -> CacheView:
        from hicache_storage.metrics import CacheView  # noqa: PLC0415 - the extra is optional

        session = self._attachment.session
        refused = {"refused_objects": sum(dict(self._refusals).values())}
        if session is None:
            return CacheView(attached=False, engine=refused)
        counts = {**refused, **session.runner.stats()}
        return CacheView(store=session.store, attached=True, engine=counts)

    # --- parts ---------------------------------------------------------------------------------------

    def _submit(
        self,
        queue: TaskQueue[Any],
        keys: Sequence[ObjectKey],
        prepare: Callable[[Session], list[Group]],
        submit: Callable[[Session, int, list[Group]], None],
        failed: Any,
    ) -> int:
        """Submit a task as a job. Without a store or without pages, the task fails at once."""
        task_id = next(self._ids)
        session = self._attachment.session
        try:
            groups = prepare(session) if session is not None else []
            if session is not None and groups:
                queue.begin(task_id, Task(keys, groups))
                submit(session, task_id, groups)
                return task_id
        except Exception:
            logger.exception("a task of LMCache could not be submitted, and has failed")
            queue.end(task_id)
        queue.finish(task_id, failed)
        return task_id

    def _object_groups(
        self, session: Session, keys: Sequence[ObjectKey], objects: Sequence[MemoryObject]
    ) -> list[Group]:
        groups = self._groups(
            session, keys, lambda n: session.layouts.of_object(keys[n], objects[n])
        )
        add_objects(groups, objects)
        return groups

    def _groups(
        self, session: Session, keys: Sequence[ObjectKey], layout_of: Callable[[int], Any]
    ) -> list[Group]:
        """Group the pages of a task by key space. Leave out pages without an identity."""
        spaces: list[KeySpace | None] = []
        hashes: list[str] = []
        for number, key in enumerate(keys):
            space, name = None, ""
            try:
                name, layout = page_hash(key), layout_of(number)
                space = session.identity.space(key, layout) if layout is not None else None
            except UnknownLayoutError as error:
                self._refuse(str(error))
            spaces.append(space)
            hashes.append(name)
        return groups_of(spaces, hashes)

    def _refuse(self, reason: str) -> None:
        """Count a page that is neither looked up nor moved. Log each reason once."""
        if reason not in self._refusals:
            if len(self._refusals) >= _MAX_REFUSALS:
                return
            logger.error("pages of LMCache are not stored: %s", reason)
        self._refusals[reason] = self._refusals.get(reason, 0) + 1

    def _notify(self, event: str, *arguments: Any) -> None:
        """Call `_notify_keys_EVENT` of LMCache's base class. Its listeners may raise."""
        try:
            getattr(self, f"_notify_keys_{event}")(*arguments)
        except Exception:
            logger.exception("pages that were %s could not be reported to LMCache", event)

    def _delete(self, session: Session, space: KeySpace, keys: list[ObjectKey]) -> bool:
        try:
            gone = session.store.delete(space, [page_hash(key) for key in keys])
        except (HiCacheError, ValueError) as error:
            logger.warning("could not delete %s: %s", counted(len(keys), "object"), error)
            return False
        if gone < len(keys):
            logger.warning(
                "could not delete %d of %s", len(keys) - gone, counted(len(keys), "object")
            )
        return gone == len(keys)

    def _accounted(self, keys: Sequence[ObjectKey], nbytes: int) -> list[int]:
        """Return the bytes to subtract for each key, at most what LMCache has counted."""
        usage = cast("Any", self).get_usage()  # defined in LMCache's base class
        left: dict[str, int] = dict(usage.bytes_by_cache_salt)
        sizes: list[int] = []
        for key in keys:
            size = min(nbytes, left.get(key.cache_salt, 0))
            left[key.cache_salt] = left.get(key.cache_salt, 0) - size
            sizes.append(size)
        return sizes
