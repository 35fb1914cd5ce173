"""Damaged replies and files under the sanitizers: no verdict is wrong, no access out of bounds.

`make fuzz` gives the harnesses of `fuzz/` ten million inputs each, beside the targets in `tests/fuzz/`.
`FUZZ_INPUTS` sets another number, `FUZZ_SEED` the first seed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from hicache_storage import native

FUZZ = Path(__file__).parent / "fuzz"
NATIVE = Path(native.__file__).parent
INPUTS = os.environ.get("FUZZ_INPUTS", "200000")
SEED = os.environ.get("FUZZ_SEED", "0")
HARNESSES = ("bulk_replies", "http_replies", "page_files", "reply_lines")
COMPILER = os.environ.get("CC", "cc")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def run(*command: str | Path) -> tuple[int, str]:
    """Run a command without this process's own sanitizers. Return its status and its output."""
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    options = "detect_leaks=1:quarantine_size_mb=16"  # more makes it slower and finds no more here
    done = subprocess.run(
        command,
        env={**plain, "ASAN_OPTIONS": options},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@cache
def can_sanitize(folder: Path) -> bool:
    """Return True if there is a C compiler with its sanitizers."""
    if not shutil.which(COMPILER):
        return False
    source = folder / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    return run(COMPILER, *SANITIZERS, source, "-o", folder / "empty")[0] == 0


@pytest.fixture(autouse=True)
def needs_a_compiler(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not (NATIVE / "module.c").exists():
        pytest.skip("the sources of the data plane are not here")
    if not can_sanitize(tmp_path_factory.getbasetemp()):
        pytest.skip(f"there is no C compiler with sanitizers ({COMPILER})")


def built(harness: str, sources: Path, folder: Path) -> Path:
    """Compile a harness with the data plane in `sources`."""
    program = folder / harness
    parts = (FUZZ / f"{harness}.c", hashes(folder.parent))
    compile_to(program, *parts, f"-I{sources}")
    return program


@cache
def hashes(folder: Path) -> Path:
    """Compile xxh3, which takes seconds under the sanitizers, once for all harnesses."""
    compile_to(folder / "xxh3.o", NATIVE / "xxh3.c", "-c")
    return folder / "xxh3.o"


def compile_to(target: Path, *arguments: str | Path) -> None:
    flags = ("-std=gnu11", "-O2", "-g", "-pthread", "-Wall", "-Wextra", *SANITIZERS)
    status, said = run(COMPILER, *flags, *arguments, "-o", target)
    assert not status, said


@pytest.mark.parametrize("harness", HARNESSES)
def test_no_input_is_misjudged(harness: str, tmp_path: Path) -> None:
    assert (0, "") == run(built(harness, NATIVE, tmp_path), INPUTS, SEED)


@pytest.mark.parametrize(
    ("harness", "source", "text", "wrong"),
    [
        pytest.param(
            "bulk_replies",
            "sockets.c",
            'memcmp(end, "\\r\\n", sizeof end) ? WRONG : HIT',
            "HIT",
            id="the end of a page is not looked at",
        ),
        pytest.param(
            "bulk_replies",
            "sockets.c",
            "if (memcmp(begun, header + HEAD_NBYTES, begun_nbytes))",
            "if (0)",
            id="the last digits of a length are not looked at",
        ),
        pytest.param(
            "bulk_replies",
            "sockets.c",
            "struct iovec local[LOCAL_PIECES + 3]",
            "struct iovec local[1]",
            id="an array is too short",
        ),
        pytest.param(
            "bulk_replies",
            "sockets.c",
            "part[i].iov_base = lost;",
            "(void)lost;",
            id="a page that was revoked is written to",
        ),
        pytest.param(
            "page_files",
            "files.c",
            "memcmp(before, after, TRAILER_NBYTES)",
            "0",
            id="a page that is overwritten meanwhile is taken",
        ),
        pytest.param(
            "page_files",
            "files.c",
            "uint8_t trailer[TRAILER_NBYTES + 1]",
            "uint8_t trailer[TRAILER_NBYTES]",
            id="a longer file is read past an array",
        ),
        pytest.param(
            "http_replies",
            "exchanges.c",
            "if (found->length >= 0 || value_nbytes > MAX_DIGITS)",
            "if (value_nbytes > MAX_DIGITS)",
            id="the last of two lengths is taken",
        ),
        pytest.param(
            "http_replies",
            "exchanges.c",
            "return !found->is_encoded++;",
            "return 1;",
            id="a chunked reply is taken for a page",
        ),
        pytest.param(
            "http_replies",
            "exchanges.c",
            "return !one->revocable || access_begin(one->revocable);",
            "return !one->revocable || access_begin(one->revocable) + 1;",
            id="memory that was revoked is used",
        ),
        pytest.param(
            "reply_lines",
            "sockets.c",
            "if (all->nbytes + STEP_NBYTES <= *capacity)",
            "if (*capacity)",
            id="long lines are received past an array",
        ),
        pytest.param(
            "reply_lines",
            "sockets.c",
            "come >= all->replies[done]",
            "come >= 1",
            id="a reply of several lines is taken for whole after one",
        ),
    ],
)
def test_a_fault_of_the_data_plane_is_found(
    harness: str, source: str, text: str, wrong: str, tmp_path: Path
) -> None:
    sources = tmp_path / "native"
    shutil.copytree(NATIVE, sources, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    right = (sources / source).read_text()
    assert 1 == right.count(text)
    (sources / source).write_text(right.replace(text, wrong))

    status, printed = run(built(harness, sources, tmp_path), INPUTS, SEED)

    assert status
    assert "the seed of this input: " in printed
