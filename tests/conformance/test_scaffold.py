"""`hicache-conformance new`: the package that it writes passes the kit without changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hicache_conformance.cli import main
from hicache_conformance.scaffold import write_package

from hicache_storage.errors import ConfigError, install_command


def run(*command: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a module of Python, with `path` as an installed distribution's directory."""
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else None
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def declare(directory: Path) -> None:
    """Write the entry points of the project, as an installer would."""
    project = (directory / "pyproject.toml").read_text(encoding="utf-8")
    target = project.split('[project.entry-points."hicache_storage.backends"]\n')[1].split("\n")[0]
    info = directory / "hicache_acme_kv-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hicache-acme-kv\nVersion: 0.1.0\n")
    lines = f"[hicache_storage.backends]\n{target.replace(chr(34), '')}\n"
    (info / "entry_points.txt").write_text(lines)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    assert main(["new", "acme-kv", "--directory", str(tmp_path)]) == 0
    return tmp_path / "hicache-acme-kv"


def test_its_own_tests_pass(package: Path) -> None:
    """A part of the tests is enough here: the next test runs all checks."""
    part = ["--hicache-quick", "-k", "kv_00"]
    done = run("pytest", "-q", "-p", "no:cacheprovider", *part, cwd=package)

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "AcmeKvStorage: incomplete" in done.stdout


@pytest.mark.slow  # all of the kit's quick checks, in one test
def test_installed_it_is_found_by_name_and_conformant(package: Path, tmp_path: Path) -> None:
    declare(package)
    flags = ["--quick", "--hicache-storage-backend", "acme-kv"]
    flags += ["--hicache-storage-backend-extra-config", json.dumps({"path": "{scratch}/pages"})]

    done = run("hicache_conformance", *flags, cwd=tmp_path, path=package)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "INCOMPLETE  acme-kv: Of " in done.stdout


@pytest.mark.slow
def test_its_report_has_the_version_of_an_editable_installation(package: Path) -> None:
    """Its metadata names no package, but its entry point does."""
    declare(package)
    part = ["-k", "a_miss_is_false_for_every_reason", "--hicache-report", "out"]
    done = run("pytest", "-q", "-p", "no:cacheprovider", *part, cwd=package, path=package)

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    result = json.loads((package / "out" / "TestAcmeKv" / "result.json").read_text())
    assert "hicache-acme-kv 0.1.0" == result["subject"]["version"]


def test_its_readme_can_be_pasted_into_a_shell(package: Path) -> None:
    readme = (package / "README.md").read_text(encoding="utf-8")

    assert install_command("conformance") in readme
    assert " \\\n      --hicache" in readme
    assert "\\\\" not in readme


def test_its_workflow_runs_the_kit_and_publishes_the_badge_of_its_class(package: Path) -> None:
    workflow = (package / ".github" / "workflows" / "conformance.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(workflow)["jobs"]

    [run] = [one for one in jobs["conformance"]["steps"] if "pytest" in one.get("run", "")]
    [publish] = [one for one in jobs["badge"]["steps"] if "run" in one]
    assert run["run"].startswith("pytest --hicache-report out ")
    assert "cp ../out/TestAcmeKv/badge.json ." in publish["run"]
    assert "class TestAcmeKv(" in (package / "tests" / "test_conformance.py").read_text()


def test_its_store_is_short(package: Path) -> None:
    lines = (package / "hicache_acme_kv" / "storage.py").read_text(encoding="utf-8").splitlines()

    assert len([line for line in lines if line]) < 120


def test_existing_files_are_left_alone(package: Path) -> None:
    readme = (package / "README.md").read_bytes()

    with pytest.raises(ConfigError, match="exists: choose another name"):
        write_package("acme-kv", package.parent)
    assert readme == (package / "README.md").read_bytes()


@pytest.mark.parametrize("name", ["", "Acme", "a_b", "../acme", "acme-", "1acme", "a" * 41, "a\nb"])
def test_a_name_that_no_backend_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a name for a backend"):
        write_package(name, tmp_path)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "owner"), [("redis", "hicache-storage"), ("dynamic", "registry")])
def test_a_name_that_is_taken_is_refused(name: str, owner: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"exists already, in .*{owner}"):
        write_package(name, tmp_path)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert main(["new", "acme", "--directory", str(tmp_path / "missing")]) == 3
