"""`make wheel`: what sdist and wheel contain, and that each works once it is installed.

pytest does not collect this file by itself: the environments are made with packages from an index. The
distributions stay in `dist/`.
"""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest
from distributions import CONSTRAINTS, DIST, VERSION, WHEELS_PYTHON, made_environment, run
from servers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

NAME = f"hicache_storage-{VERSION}"
NO_COMPILER = {"CC": "no-such-compiler"}
REFERENCE_SERVES = "hicache-storage runs without its compiled data plane: "
PLATFORMS = {
    f"{libc}_{machine}"
    for libc in ("manylinux_2_17", "musllinux_1_2")
    for machine in ("x86_64", "aarch64")
}
RENDER = """
import sys, zipfile
from email import message_from_bytes
from readme_renderer.markdown import render
wheel = zipfile.ZipFile(sys.argv[1])
(name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
print(render(message_from_bytes(wheel.read(name)).get_payload()))
"""


@pytest.fixture(scope="module")
def installed_wheel(
    distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Install the wheel where there is no program but Python's. Return the programs."""
    programs = made_environment(tmp_path_factory.mktemp("wheel") / "environment")
    command = (programs / "pip", "install", "-c", CONSTRAINTS, distributions[1])
    run(DIST, *command, PATH=str(programs))
    return programs


@pytest.fixture(scope="module")
def installed_sdist(
    distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Install the sdist without a compiler. Return the programs, and what pip printed."""
    programs = made_environment(tmp_path_factory.mktemp("sdist") / "environment")
    command = (programs / "pip", "install", "-v", "-c", CONSTRAINTS, distributions[0])
    return programs, run(DIST, *map(str, command), **NO_COMPILER)


def replay(programs: Path, directory: Path) -> str:
    """Do what `make demo` does, with no program but those of the environment."""
    config = json.dumps({"path": str(directory / "pages")})
    options = ("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config")
    return run(directory, programs / "hicache", "replay", *options, config, PATH=str(programs))


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_each_platform_has_one_wheel_for_python_3_11_and_later(
    distributions: tuple[Path, Path],
) -> None:
    wheels = {path.name for path in distributions[1].parent.glob("*.whl")}

    assert {f"{NAME}-cp311-abi3-{platform}.whl" for platform in PLATFORMS} == wheels


def test_the_wheels_differ_in_the_compiled_module_only(distributions: tuple[Path, Path]) -> None:
    """RECORD has the checksum of the module, and WHEEL the tag."""
    first, *others = (
        {info.filename: info.CRC for info in zipfile.ZipFile(path).infolist()}
        for path in DIST.glob("*.whl")
    )
    differing = {name for other in others for name, _ in first.items() ^ other.items()}

    assert {"_native.abi3.so", "RECORD", "WHEEL"} == {name.rpartition("/")[2] for name in differing}


def test_the_wheel_has_the_packages_and_the_compiled_module(
    distributions: tuple[Path, Path],
) -> None:
    names = names_in(distributions[1])
    packages = {"hicache_storage", "hicache_backends", "hicache_conformance"}
    native = {name.split("/")[2] for name in names if name.startswith("hicache_storage/native/")}

    assert {*packages, f"{NAME}.dist-info"} == {name.split("/")[0] for name in names}
    assert {f"{package}/py.typed" for package in packages} <= names
    assert {"__init__.py", "_native.abi3.so", "_sources.py", "reference", "transports.py"} == native


def test_the_wheel_has_every_module_of_the_tree(distributions: tuple[Path, Path]) -> None:
    tree = {
        str(path.relative_to(folder))
        for folder, package in (
            (ROOT, "hicache_storage"),
            (ROOT / "backends", "hicache_backends"),
            (ROOT / "conformance", "hicache_conformance"),
        )
        for path in (folder / package).rglob("*.py")
    }

    assert {"hicache_storage/native/_build.py"} == tree - names_in(distributions[1])


def test_the_sdist_has_the_sources_in_c_and_nothing_compiled(
    distributions: tuple[Path, Path],
) -> None:
    with tarfile.open(distributions[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    native = ROOT / "hicache_storage" / "native"
    sources = {str(path.relative_to(ROOT)) for path in native.rglob("*.[ch]")}

    assert sources
    assert {*sources, "hatch_build.py", "hicache_storage/native/_build.py"} <= names
    assert not {name for name in names if name.endswith((".so", ".o", ".pyc"))}


def test_an_installed_wheel_is_compiled(installed_wheel: Path, tmp_path: Path) -> None:
    assert "The data plane is compiled." in run(tmp_path, installed_wheel / "hicache", "backends")


def test_an_installed_wheel_replays(installed_wheel: Path, tmp_path: Path) -> None:
    print(replay(installed_wheel, tmp_path))  # noqa: T201 - a failure shows it


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("pipx", "pipx run --spec {wheel} hicache-storage --version"),
        ("pipx", "pipx run --spec {wheel} hicache --version"),
        ("uv", "uvx {wheel} --version"),
        ("uv", "uvx --from {wheel} hicache --version"),
        ("uv", "uv tool install {wheel} && bin/hicache --version"),
    ],
)
def test_a_program_runner_runs_the_wheel(
    package: str, command: str, distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """From an index, `pipx run hicache-storage` and `uvx hicache-storage` run the second name."""
    programs = made_environment(tmp_path / "environment")
    run(DIST, programs / "pip", "install", "-c", CONSTRAINTS, package)
    homes = {name: str(tmp_path / name) for name in ("PIPX_HOME", "UV_TOOL_DIR")}
    homes |= {"UV_TOOL_BIN_DIR": str(tmp_path / "bin"), "UV_PYTHON_DOWNLOADS": "never"}
    shell = command.format(wheel=distributions[1])
    printed = run(tmp_path, "/bin/sh", "-c", shell, PATH=f"{programs}:/usr/bin:/bin", **homes)

    assert f"hicache {VERSION} (compiled data plane)" in printed


def test_the_page_of_an_index_has_no_relative_link(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    url = "https://github.com/example/hicache-storage"
    command = (WHEELS_PYTHON, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    run(ROOT, *map(str, command), HICACHE_NATIVE="0", HICACHE_REPOSITORY=url)
    (wheel,) = tmp_path.glob("*.whl")
    page = run(tmp_path, WHEELS_PYTHON, "-c", RENDER, wheel)

    links = re.findall(r'(?:href|src)="([^"]+)"', page)
    assert f"{url}/blob/v{VERSION}/docs/sglang.md" in links
    assert f"git clone {url} " in re.sub("<[^>]+>", "", page)
    assert f"{url}/raw/v{VERSION}/docs/images/tiers-light.svg" in links
    assert [] == [link for link in links if not re.match("https?://|#", link)]


def test_an_install_without_a_compiler_prints_one_line(
    installed_sdist: tuple[Path, str],
) -> None:
    said = [line for line in installed_sdist[1].splitlines() if REFERENCE_SERVES in line]

    assert 1 == len(said)
    assert said[0].endswith("there is no C compiler (no-such-compiler)")


def test_an_install_without_a_compiler_serves_by_the_reference(
    installed_sdist: tuple[Path, str], tmp_path: Path
) -> None:
    printed = run(tmp_path, installed_sdist[0] / "hicache", "backends")

    assert f"{NAME}-py3-none-any.whl" in installed_sdist[1]
    assert "The data plane is the Python reference: there is no compiled module" in printed


def test_an_install_without_a_compiler_replays(
    installed_sdist: tuple[Path, str], tmp_path: Path
) -> None:
    print(replay(installed_sdist[0], tmp_path))  # noqa: T201 - a failure shows it


def test_a_compiled_data_plane_can_be_left_out(installed_wheel: Path, tmp_path: Path) -> None:
    command = (installed_wheel / "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT))
    run(tmp_path, *command, HICACHE_NATIVE="0")

    (wheel,) = tmp_path.iterdir()
    assert f"{NAME}-py3-none-any.whl" == wheel.name
    assert not {name for name in names_in(wheel) if name.endswith((".so", ".c", ".h"))}


def test_a_compiled_data_plane_can_be_required(
    installed_sdist: tuple[Path, str], distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    command = (installed_sdist[0] / "pip", "wheel", "--no-deps", distributions[0])

    with pytest.raises(AssertionError, match="HICACHE_NATIVE is 1, but there is no compiled"):
        run(tmp_path, *command, **NO_COMPILER, HICACHE_NATIVE="1")
