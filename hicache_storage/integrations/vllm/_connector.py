"""The vLLM connector. Its base class is added later, so that this module does not import vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from hicache_storage.integrations.vllm._adapters import Adapters
from hicache_storage.integrations.vllm._identity import check_engine, identity_of
from hicache_storage.integrations.vllm._region import check_siblings
from hicache_storage.integrations.vllm._settings import complete_tiers, tier_settings
from hicache_storage.integrations.vllm._tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.integrations.vllm._runtime import Runtime


class Connector:
    """vLLM's `OffloadingConnector` for a tier of this project. It computes the tier's identity.

    In the scheduler, it refuses engines whose pages cannot be identified. vLLM does everything else.
    """

    runtime: ClassVar[Runtime]
    """vLLM's version and platform."""
    variables: ClassVar[Mapping[str, Callable[[], Any]]]
    """vLLM's environment variables, with functions that return their values."""
    is_offloading: ClassVar[Callable[[Mapping[str, Any]], bool]]
    """Return whether a child of `MultiConnector` is one of vLLM's offloading connectors, or ours."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Add the identity to the config of the tier, and start vLLM's connector.

        Raises:
            ConfigError: A field is invalid, a property that the KV depends on is unknown, or another
                connector of this engine uses the same memory.
        """
        check_siblings(type(self).is_offloading)
        self._adapters = Adapters()
        tiers = complete_tiers(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if role.name == "SCHEDULER":  # workers do not have a tier
            for tier in tiers:
                settings = tier_settings({**tier, "identity": None})
                check_engine(vllm_config, single_node=settings.single_node)
                tier["identity"] = identity_of(
                    vllm_config, kv_cache_config, settings, self.runtime, self.variables
                )
        cast("Any", super()).__init__(vllm_config, role, kv_cache_config)
        manager = getattr(getattr(self, "connector_scheduler", None), "manager", None)
        found: Any = getattr(manager, "secondary_tiers", ())
        self._tiers = [tier for tier in found if isinstance(tier, Tier)]

    def on_new_request(self, request: Any) -> None:
        """Tell the tiers which adapter a new request has, and record its prompt in their `trace`."""
        if on_new_request := getattr(super(), "on_new_request", None):
            on_new_request(request)
        adapter = self._adapters.of(request)
        for tier in self._tiers:
            if adapter is not None:
                tier.note_adapter(request.request_id, adapter)
            tier.record_request(request)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, Sequence[object]],
    ) -> Any:
        """Return vLLM's exporter.

        First complete the tiers in the config, because this process may have no connector.

        Raises:
            ConfigError: A field is invalid, or another connector of this engine uses the same memory.
        """
        check_siblings(cls.is_offloading)
        complete_tiers(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return cast("Any", super()).build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
