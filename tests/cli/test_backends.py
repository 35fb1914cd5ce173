"""`hicache backends`: usable backends, and missing dependencies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_storage.cli import main
from hicache_storage.errors import BackendNotInstalled, install_command
from hicache_storage.registry import backends


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with one backend that lacks a library, and one that is broken."""
    info = tmp_path / "hicache_acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hicache-acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hicache_storage.backends]\nlacking = acme_lacking:Storage [s3]\nbroken = acme_broken:S\n"
    )
    (tmp_path / "acme_lacking.py").write_text("import no_such_library\n")
    (tmp_path / "acme_broken.py").write_text("raise RuntimeError('[red]boom')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def _listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert main(["backends", "--json"]) == 0
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}


def test_json_has_capabilities_and_origin(capsys: pytest.CaptureFixture[str]) -> None:
    memory = _listed(capsys)["memory"]

    assert memory["installed"] is True
    assert memory["problem"] is None
    assert memory["capabilities"]["retention"] == "until-deleted"
    assert memory["distribution"] == "hicache-storage"
    assert memory["target"] == "hicache_backends.memory:MemoryStorage"


@pytest.mark.usefixtures("plug_ins")
def test_on_80_columns_each_backend_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["backends"]) == 0

    lines = capsys.readouterr().out.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.strip(" ─") == "" and line)
    table = lines[rule + 1 : rule + 1 + len(_listed(capsys))]
    assert [line.split()[0] for line in table] == list(_listed(capsys))
    assert max(map(len, lines[: rule + 1 + len(table)])) <= 80
    assert "bounded" in lines[rule - 1]
    assert "until-deleted" in " ".join(table)
    assert not any("…" in line for line in lines)


def test_a_flag_prints_all_capabilities(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--capabilities"]) == 0
    printed = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("file: ")
    )

    for name, value in _listed(capsys)["file"]["capabilities"].items():
        assert f"{name.replace('_', ' ')} {value}" in printed
    assert "bounded " in printed


def test_a_wide_terminal_shows_them_in_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["backends"]) == 0

    printed = capsys.readouterr().out
    assert "scatter gather" in printed
    assert "hicache-storage" in printed


def test_mooncake_names_the_package_for_machines_without_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [*sys.modules]:
        if name.startswith(("mooncake", "hicache_backends.mooncake")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mooncake", None)

    with pytest.raises(BackendNotInstalled) as raised:
        backends()["mooncake"].load()

    assert f": {install_command('mooncake')}, or" in str(raised.value)
    assert f"no CUDA: {install_command('mooncake-non-cuda')}" in str(raised.value)


@pytest.mark.usefixtures("plug_ins")
def test_a_missing_library_comes_with_its_install_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lacking = _listed(capsys)["lacking"]

    assert lacking["installed"] is False
    assert lacking["capabilities"] == {}
    assert "no_such_library" in lacking["problem"]
    assert 'pip install "hicache-acme[s3]"' in lacking["problem"]


@pytest.mark.usefixtures("plug_ins")
def test_a_broken_plug_in_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    listed = _listed(capsys)

    assert listed["broken"]["problem"] == "[red]boom"
    assert listed["memory"]["installed"] is True


@pytest.mark.usefixtures("plug_ins")
def test_the_table_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0

    assert "[red]boom" in capsys.readouterr().out
