"""What the fingerprint of a LoRA adapter says, and when nobody can know it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache_storage.integrations.vllm._adapters import Adapter, Adapters


def written(path: Path, weights: str = "step 1") -> str:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_text(weights)
    return str(path)


def label_of(path: str, *, trusted: bool = False, started_s: float | None = None) -> str | None:
    """Return the label for an engine that started after the files were written."""
    return Adapter(path, time.time() + 1 if started_s is None else started_s).label(trusted=trusted)


def test_equal_weights_have_one_label_and_others_another(tmp_path: Path) -> None:
    one = label_of(written(tmp_path / "one"))

    assert one
    assert (
        one == label_of(written(tmp_path / "copy")) == label_of(str(tmp_path / "one"), trusted=True)
    )
    assert one != label_of(written(tmp_path / "other", "step 2"))


def test_files_that_change_have_no_label_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has loaded the former files, or has KV of them."""
    path = written(tmp_path / "adapter")
    adapter = Adapter(path, time.time() + 1)
    before = adapter.label(trusted=True)
    written(tmp_path / "adapter", "step 2")

    assert before
    assert [None, None] == [adapter.label(trusted=trusted) for trusted in (True, False)]
    (line,) = caplog.messages
    assert path in line
    assert "have changed" in line


def test_files_that_are_newer_than_the_engine_need_a_revision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others may have been there when vLLM loaded the adapter."""
    path = written(tmp_path / "adapter")

    assert label_of(path, started_s=time.time() - 5) is None
    assert label_of(path, started_s=time.time() - 5, trusted=True) == label_of(path)
    (line,) = caplog.messages
    assert f"{path} changed at" in line
    assert '"revision"' in line


def test_a_link_that_was_moved_since_the_start_needs_a_revision(tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    old_s = time.time() - 1
    for file in Path(written(path)).iterdir():
        os.utime(file, (0, 0))
    (tmp_path / "current").symlink_to(path)

    assert label_of(str(tmp_path / "current"), started_s=old_s) is None


def test_a_name_that_is_not_a_directory_needs_a_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert label_of("organization/adapter") is None
    assert "" == label_of("organization/adapter", trusted=True)


def test_files_that_cannot_be_read_have_no_label(tmp_path: Path) -> None:
    path = written(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.safetensors").mkdir()  # as root may read everything
    (tmp_path / "adapter" / "adapter_config.json").unlink()

    assert label_of(path) is None


def test_requests_of_one_path_have_one_adapter(tmp_path: Path) -> None:
    adapters = Adapters()
    lora = SimpleNamespace(lora_path=written(tmp_path / "adapter"))

    assert adapters.of(SimpleNamespace(lora_request=None)) is None
    first = adapters.of(SimpleNamespace(lora_request=lora))
    assert first is not None
    assert first is adapters.of(SimpleNamespace(lora_request=lora))
