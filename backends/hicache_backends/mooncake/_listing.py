"""The master's HTTP port: its list of keys."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from hicache_backends.mooncake._settings import MooncakeSettings


def keys(settings: MooncakeSettings, prefix: str) -> list[str]:
    """Every key of the cluster that begins with `prefix`.

    Raises:
        StorageUnavailable, StorageTimeout: The port does not answer.
    """
    host = settings.master[0] if settings.master else ""
    place = f"{host}:{settings.master_metrics_port}"
    connection = http.client.HTTPConnection(
        host, settings.master_metrics_port, timeout=settings.timeout_s
    )
    try:
        connection.request("GET", "/get_all_keys")
        answer = connection.getresponse()
        text, status = answer.read().decode("utf-8", "replace"), answer.status
    except TimeoutError as error:
        raise StorageTimeout(
            f"mooncake: the master's list of keys at {place} did not come within"
            f" {settings.timeout_s:g} s"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise StorageUnavailable(
            f"mooncake: the master's list of keys at {place} cannot be read: is master_metrics_port"
            " its --metrics_port?"
        ) from error
    finally:
        connection.close()
    if status != http.client.OK:
        raise StorageUnavailable(f"mooncake: {place} answered HTTP {status} to a list of keys")
    return [key for key in text.splitlines() if key.startswith(prefix)]
