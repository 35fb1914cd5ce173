"""The names of platforms and releases in key spaces."""

from __future__ import annotations

import platform
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.integrations._platform import platform_name, release_of

if TYPE_CHECKING:
    from collections.abc import Callable

torch = pytest.importorskip("torch")


@pytest.fixture
def built_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let torch be a build for CUDA or ROCm."""

    def build(*, cuda: str | None = None, hip: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)

    return build


def test_amd_chips_are_named_by_their_architecture_without_its_features(
    built_for: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    built_for(hip="7.0")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", [properties].__getitem__)
    assert platform_name() == platform_name("cuda:3") == "rocm-gfx942"
    assert platform_name("cuda", "gfx950:sramecc+:xnack-") == "rocm-gfx950"


def test_nvidia_chips_are_named_by_their_capability(
    built_for: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    built_for(cuda="12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert platform_name() == "cuda-sm90"
    assert platform_name("cuda", "sm100") == "cuda-sm100"


def test_other_devices_are_named_by_their_product(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "Ascend910B3")
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    assert platform_name("npu") == "npu-ascend910b3"
    assert platform_name("xpu", "Intel(R) Arc(TM) B580") == "xpu-intel-r-arc-tm-b580"


def test_a_processor_is_named_by_its_kind() -> None:
    assert platform_name("cpu") == f"cpu-{platform.machine()}"


@pytest.mark.parametrize("device_type", ["", "cuda", "mps", "npu"])
def test_an_accelerator_without_a_family_is_refused(
    device_type: str, built_for: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(*_: object) -> None:
        raise RuntimeError("no device")

    built_for(cuda="12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", no_device)
    with pytest.raises(ConfigError, match='set the adapter\'s field "platform"'):
        platform_name(device_type)


def test_a_build_of_a_release_is_that_release() -> None:
    assert release_of("0.5.23") == release_of("0.5.23+cu129") == "0.5.23"
    assert release_of("0.5.23.post1") == "0.5.23.post1"
    assert release_of("0.6.0.dev7+g1a2b3c4") == "0.6.0.dev7+g1a2b3c4"
