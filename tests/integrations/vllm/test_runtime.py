"""The names of vLLM's release and platform in key spaces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.vllm._runtime import Runtime
from hicache_storage.integrations.vllm._settings import TierSettings

torch = pytest.importorskip("torch")


def platform(kind: str, capability: tuple[int, int] | None = None, *, rocm: bool = False) -> Any:
    """Return an object with the methods of vLLM's platform that the adapter calls."""
    fnuz = rocm and capability == (9, 4)
    major, minor = capability or (0, 0)
    return SimpleNamespace(
        device_type=kind,
        is_rocm=lambda: rocm,
        get_device_capability=lambda: SimpleNamespace(major=major, minor=minor),
        get_device_name=lambda: "Data Center GPU Max 1550",
        fp8_dtype=lambda: torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn,
    )


HOPPER = platform("cuda", (9, 0))
BLACKWELL = platform("cuda", (10, 0))
MI300 = platform("cuda", (9, 4), rocm=True)
MI355 = platform("cuda", (9, 5), rocm=True)


def labels(device: Any, version: str = "0.33.0", **fields: Any) -> str:
    return Runtime(version, device).labels(TierSettings(backend="memory", **fields))


def test_every_chip_family_and_release_has_labels_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {labels(HOPPER), labels(BLACKWELL), labels(HOPPER, "0.33.1"), labels(HOPPER, "0.34.0")}
    with monkeypatch.context() as rocm:
        rocm.setattr(torch.version, "hip", "7.0")
        found |= {labels(MI300), labels(MI355)}
    found |= {labels(platform("cpu")), labels(platform("xpu"))}

    assert 8 == len(found)
    assert "vllm=0.33.0;platform=cuda-sm90" in found
    assert "vllm=0.33.0;platform=rocm-gfx94" in found


def test_releases_share_pages_only_if_all_of_them_say_so() -> None:
    shared = {labels(HOPPER, v, share_between_releases=True) for v in ("0.32.0", "0.33.0")}

    assert 1 == len(shared)
    assert labels(HOPPER) not in shared
    assert labels(BLACKWELL, share_between_releases=True) not in shared


def test_builds_of_one_release_are_that_release() -> None:
    assert labels(HOPPER, "0.33.0+cu129") == labels(HOPPER, "0.33.0")


def test_a_platform_can_be_named() -> None:
    assert "vllm=0.33.0;platform=mine" == labels(HOPPER, platform="mine")


def test_an_unknown_chip_is_refused() -> None:
    device = platform("xpu")
    device.get_device_name = str

    with pytest.raises(ConfigError, match=r"vllm: .*\"platform\""):
        labels(device)


@pytest.mark.parametrize(
    ("label", "nvidia", "mi300", "mi355"),
    [
        ("fp8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3fn"),
        ("fp8_e5m2", "fp8_e5m2", "fp8_e5m2-float8_e4m3fnuz", "fp8_e5m2"),
        ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_fp8_has_the_name_of_its_format(label: str, nvidia: str, mi300: str, mi355: str) -> None:
    devices = (HOPPER, MI300, MI355)

    assert [nvidia, mi300, mi355] == [Runtime("", each).fp8_type(label) for each in devices]


def test_fp8_alone_names_no_format() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e4m3.*kv_dtype"):
        Runtime("0.33.0", HOPPER).fp8_type("fp8")
