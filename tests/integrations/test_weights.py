"""Fingerprints of checkpoints: equal for copies, different for other weights, and fast."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_storage.integrations import _weights
from hicache_storage.integrations._weights import change_since, file_digest, weights_at


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    """Write a file in the safetensors format."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [start, start + len(data)],
        }
        start += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def checkpoint(place: Path, fill: int = 1, last: int | None = None, config: str = "{}") -> Path:
    """Write a checkpoint of two files with two tensors each. `last` fills the last tensor."""
    place.mkdir(parents=True)
    (place / "config.json").write_text(config)
    a, b = bytes([fill]) * 100_000, bytes([fill if last is None else last]) * 50
    write_safetensors(place / "model-1.safetensors", {"embed": a, "q": a})
    write_safetensors(place / "model-2.safetensors", {"k": a, "norm": b})
    names = {"embed": "model-1.safetensors", "k": "model-2.safetensors"}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return place


def test_a_copy_elsewhere_is_the_same(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one")
    shutil.copytree(one, tmp_path / "two")
    (tmp_path / "two" / "README.md").write_text("another file that no weights are in")

    assert weights_at(str(one)) == weights_at(str(tmp_path / "two")) != ""


def test_what_training_left_behind_does_not_count(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one")
    shutil.copytree(one, tmp_path / "two")
    for name in ("training_args.bin", "optimizer.pt", "trainer_state.json", "all_results.json"):
        (tmp_path / "two" / name).write_text("{}")

    assert weights_at(str(one)) == weights_at(str(tmp_path / "two"))


@pytest.mark.parametrize(
    "other",
    [{"fill": 2}, {"last": 2}, {"config": '{"rope_theta": 1}'}],
    ids=lambda other: next(iter(other)),
)
def test_other_weights_or_another_config_are_another(tmp_path: Path, other: dict[str, int]) -> None:
    one = checkpoint(tmp_path / "one")
    two = checkpoint(tmp_path / "two", **other)  # type: ignore[arg-type] # each has its own type

    assert weights_at(str(one)) != weights_at(str(two))


@pytest.mark.parametrize(
    "name",
    [
        *("consolidated.safetensors", "pytorch_model.bin", "modeling_my.py", "layers/rope.py"),
        *("preprocessor_config.json", "processor_config.json", "hf_quant_config.json"),
    ],
)
def test_each_file_that_kv_may_depend_on_counts(tmp_path: Path, name: str) -> None:
    file = checkpoint(tmp_path / "one") / name
    file.parent.mkdir(exist_ok=True)
    fingerprints = {weights_at(str(tmp_path / "one"))}
    for text in ('{"a": 1}', '{"a": 2}'):
        file.write_text(text)
        fingerprints.add(weights_at(str(tmp_path / "one")))

    assert 3 == len(fingerprints)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"]
)
def test_files_of_the_tokenizer_and_the_sampler_do_not_count(tmp_path: Path, name: str) -> None:
    place = checkpoint(tmp_path / "one")
    before = weights_at(str(place))
    (place / name).write_text("{}")

    assert before == weights_at(str(place))


def test_code_of_another_repository_counts_by_its_bytes_or_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "config.json").write_text("{}")

    def cached(repository: str, name: str, **__: Any) -> str | None:
        return str(code / name) if repository == "org/code" and name == "config.json" else None

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", SimpleNamespace(try_to_load_from_cache=cached)
    )
    place = checkpoint(tmp_path / "one")
    fingerprints: set[str] = set()
    for repository in ("org/code", "org/absent", "org/other"):
        mapped = {"AutoConfig": f"{repository}--modeling.C", "AutoModel": ["modeling.M", None]}
        (place / "config.json").write_text(json.dumps({"auto_map": mapped}))
        for text in ("a = 1", "a = 2"):
            (code / "modeling.py").write_text(text)
            fingerprints.add(weights_at(str(place)))

    assert 4 == len(fingerprints)  # two of the code that is here, one of each other name


@pytest.mark.parametrize("change", ["weights", "link", "code", "directory"])
def test_a_change_after_the_weights_were_loaded_is_found(tmp_path: Path, change: str) -> None:
    for name in ("v1", "v2"):
        checkpoint(tmp_path / name)
    (tmp_path / "v1" / "modeling.py").write_text("a = 1")
    current = tmp_path / "current"
    current.symlink_to("v1")
    loaded_at_s = time.time() + 0.05
    time.sleep(0.1)
    assert not change_since(loaded_at_s, str(current))

    if change == "weights":
        os.utime(tmp_path / "v1" / "model-1.safetensors", (1, 1))
    elif change == "link":
        current.unlink()
        current.symlink_to("v2")
    elif change == "code":
        (tmp_path / "v1" / "modeling.py").write_text("a = 2")
    else:
        (tmp_path / "v1").rename(tmp_path / "old")
        (tmp_path / "v2").rename(tmp_path / "v1")

    assert re.match(rf"{tmp_path}\S* changed at \d{{4}}-", change_since(loaded_at_s, str(current)))


def hub_with(place: Path) -> SimpleNamespace:
    """Return a module as huggingface_hub, which has the files in `place`."""

    def found(_: str, name: str, **__: object) -> str:
        return str(place / name)

    return SimpleNamespace(try_to_load_from_cache=found)


@pytest.mark.parametrize("downloads", [False, True])
def test_a_branch_that_moves_to_an_older_snapshot_is_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, downloads: bool
) -> None:
    place = checkpoint(tmp_path / "models--org--m" / "snapshots" / "1")
    branch = tmp_path / "models--org--m" / "refs" / "main"
    branch.parent.mkdir()
    branch.write_text("1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub_with(place))
    loaded_at_s = time.time() + 0.05
    time.sleep(0.1)
    assert not change_since(loaded_at_s, "org/m", downloads=downloads)

    branch.write_text("2")

    assert f"{branch} changed at " in change_since(loaded_at_s, "org/m", downloads=downloads)
    assert not change_since(loaded_at_s, "org/m", "1" * 40, downloads=downloads)


def test_files_that_the_engine_downloads_are_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = checkpoint(tmp_path / "models--org--m" / "snapshots" / "1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub_with(place))

    assert change_since(0, "org/m")
    assert not change_since(0, "org/m", downloads=True)


def test_what_no_fingerprint_covers_has_no_change(tmp_path: Path) -> None:
    assert not change_since(0, str(tmp_path / "absent"))
    assert not change_since(0, "org/not-downloaded")


def test_this_process_has_started_a_moment_ago() -> None:
    command = "from hicache_storage.integrations._weights import process_started_s as s; print(s())"
    began_s = time.time()
    started = subprocess.run(
        [sys.executable, "-c", command], check=True, capture_output=True, text=True
    )

    assert began_s - 1 < float(started.stdout) <= time.time() + 0.1


def test_a_few_kilobytes_of_each_file_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "big.gguf"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)  # reading it would take an hour
    nbytes: list[int] = []
    add = _weights._add

    def counted(digest: Any, *parts: bytes) -> None:
        nbytes.append(len(parts[-1]))
        add(digest, *parts)

    monkeypatch.setattr(_weights, "_add", counted)

    assert weights_at(str(file))
    assert sum(nbytes) < 1 << 20


def test_files_are_read_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = checkpoint(tmp_path / "one")
    both = threading.Barrier(2, timeout=30)
    sampled = _weights._sample_offsets

    def meet(*arguments: Any) -> Any:
        both.wait()
        return sampled(*arguments)

    monkeypatch.setattr(_weights, "_sample_offsets", meet)

    assert weights_at(str(place))


def test_an_adapter_in_the_hubs_cache_has_a_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "snapshot"
    place.mkdir()
    (place / "adapter_config.json").write_text("{}")
    write_safetensors(place / "adapter_model.safetensors", {"lora_A": b"a" * 100})

    def cached(_: str, name: str, **__: Any) -> str | None:
        return str(place / name) if (place / name).is_file() else None

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", SimpleNamespace(try_to_load_from_cache=cached)
    )

    assert weights_at("org/adapter") == weights_at(str(place)) != ""


def test_any_other_file_of_weights_counts_as_well(tmp_path: Path) -> None:
    fingerprints: set[str] = set()
    for byte in (b"a", b"b"):
        (tmp_path / "pytorch_model.bin").write_bytes(byte * 1000)
        fingerprints.add(weights_at(str(tmp_path)))

    assert len(fingerprints) == 2


def header(text: str) -> bytes:
    """Return the bytes of a safetensors file with this header and 16 bytes of tensors."""
    return struct.pack("<Q", len(text)) + text.encode() + bytes(16)


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{]"),
        header("[" * 100_000),
        *(
            header(f'{{"a": {{"data_offsets": [{start}, {end}]}}}}')
            for start, end in (
                ("0", "1e999"),
                ("-900", "8"),
                ("8", "0"),
                ("0", "9" * 30),
                ("17", "18"),
            )
        ),
    ],
    ids=range(10),
)
def test_a_file_with_a_damaged_header_has_a_fingerprint(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(damage)

    assert weights_at(str(tmp_path))


@pytest.mark.parametrize(
    "index", ["[]", "{", "[" * 100_000, '{"weight_map": {"a": "gone.safetensors"}}'], ids=range(4)
)
def test_an_invalid_index_is_ignored(tmp_path: Path, index: str) -> None:
    place = checkpoint(tmp_path / "one")
    (place / "model.safetensors.index.json").write_text(index)

    assert weights_at(str(place))


def test_no_weights_have_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert [
        weights_at(str(tmp_path)),
        weights_at("org/not-downloaded"),
        weights_at("s3://b/k"),
        weights_at("~nobody-here/model"),
    ] == [""] * 4


def test_a_files_digest_is_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")

    assert file_digest(str(tmp_path / "a")) != file_digest(str(tmp_path / "b"))
