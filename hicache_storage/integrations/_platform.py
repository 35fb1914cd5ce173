"""Name the platform and the engine's release for key spaces, because bytes of KV depend on both.

Chips of other vendors and families have other fp8 formats and byte orders, and a release of an engine
may change a default that decides how KV is computed.
"""

from __future__ import annotations

import platform
import re
from typing import Any

from hicache_storage.errors import ConfigError
from hicache_storage.settings import Settings


class PlatformSettings(Settings):
    """The fields of an adapter that name its platform, and that choose which releases share pages."""

    platform: str = ""
    """The vendor and chip family, for example "cuda-sm90", if this process can't see the device."""
    share_between_releases: bool = False
    """Whether servers of different releases of the engine share pages. Set it only if you know that they
    compute and store equal KV."""


def platform_name(device_type: str = "", family: str = "") -> str:
    """Return the vendor and the chip family, for example "cuda-sm90", "rocm-gfx942" or "cpu-x86_64".

    Args:
        device_type: torch's name of the device type that the engine uses. "": torch's accelerator.
        family: The engine's own answer, for example "sm90" or "gfx942:sramecc+". "": ask torch, which
            initializes the device in this process, so that it must not fork afterwards.

    Raises:
        ConfigError: There is an accelerator, but its family is unknown.
    """
    import torch  # noqa: PLC0415 - the engine has loaded it

    built: Any = torch.version
    kind = device_type.partition(":")[0] or _accelerator(torch)
    if kind == "cpu":
        return f"cpu-{platform.machine()}"
    vendor = "rocm" if kind == "cuda" and built.hip else kind
    reason: object = "it has no name"
    try:
        family = family or _family(vendor, getattr(torch, kind))
    except (AttributeError, AssertionError, RuntimeError, ValueError) as error:
        reason = error
    # AMD appends features, as in "gfx942:sramecc+:xnack-"
    name = re.sub(r"[^a-z0-9.]+", "-", family.partition(":")[0].lower()).strip("-")
    if not name:
        raise ConfigError(
            f"the chip family of this {vendor} device is unknown ({reason}): set the adapter's field"
            ' "platform" to its name, for example "cuda-sm90" or "rocm-gfx942"'
        )
    return f"{vendor}-{name}"


def release_of(version: str) -> str:
    """Return the release that `version` is a build of: "0.5.23" of "0.5.23+cu129".

    A development version is a release of its own, with the commit that it was built from.
    """
    return version if ".dev" in version else version.partition("+")[0]


def _accelerator(torch: Any) -> str:
    if torch.version.cuda or torch.version.hip:
        return "cuda"
    for kind in ("xpu", "npu"):
        device = getattr(torch, kind, None)
        if device is not None and device.is_available():
            return kind
    return "cpu"


def _family(vendor: str, device: Any) -> str:
    if vendor == "cuda":
        major, minor = device.get_device_capability()
        return f"sm{major}{minor}"
    if vendor == "rocm":
        return str(device.get_device_properties(device.current_device()).gcnArchName)
    return str(device.get_device_name())
