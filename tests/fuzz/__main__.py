"""Coverage-guided fuzzing of the parsers, one after the other: `python -m fuzz [NAME ...] --runs N`.

Targets in Python run under atheris, in one process for each processor. Harnesses in C run under the
sanitizers, as tests/native/ builds them. The corpora grow in artifacts/fuzz. An input that a target
misjudges is left there as NAME-crash-*.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fuzz.catalogue import NAMES, Target
from fuzz.scratch import MEMORY

_ROOT = Path(__file__).parents[2]
_ARTIFACTS = _ROOT / "artifacts" / "fuzz"
_PREFIX = "native-"
_HARNESSES = sorted(
    f"{_PREFIX}{path.stem}" for path in (_ROOT / "tests" / "native" / "fuzz").glob("*.c")
)
_EXECUTIONS = re.compile(r"stat::number_of_executed_units: +(\d+)")
_COVERAGE = re.compile(r"cov: (\d+)")
_MOST_NBYTES = 8192
_SLOWEST_INPUT_S = 20
_MOST_MIB = 4096
_JOBS = os.cpu_count() or 1


def main() -> int:
    """Print a line for each target. Return 1 if one of them has a finding."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a target (default: all)")
    parser.add_argument("--runs", type=int, default=10_000_000, help="inputs for each target")
    parser.add_argument("--seconds", type=int, default=0, help="the limit of each target; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {*NAMES, *_HARNESSES}
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}: {', '.join((*NAMES, *_HARNESSES))}")
    chosen = arguments.names or [*NAMES, *_HARNESSES]
    failed = [name for name in chosen if not _run(name, arguments)]
    if failed:
        print(f"findings: {', '.join(failed)}")
    return int(bool(failed))


def _run(name: str, arguments: argparse.Namespace) -> bool:
    begun_s = time.monotonic()
    run = _fuzzed if name in NAMES else _harnessed
    executions, said, is_right = run(name, arguments)
    took_s = time.monotonic() - begun_s
    rate = f"{executions / took_s:,.0f}/s"
    print(f"{name:22} {executions:>12,} inputs {rate:>12} {said}", flush=True)
    return is_right


def _fuzzed(name: str, arguments: argparse.Namespace) -> tuple[int, str, bool]:
    """Run a target in Python. Return its executions, a remark, and True if it has no finding."""
    grown = _ARTIFACTS / name
    grown.mkdir(parents=True, exist_ok=True)
    target = Target.load(name)
    with tempfile.TemporaryDirectory(prefix="hicache-fuzz-", dir=MEMORY) as scratch:
        kept = Path(scratch, "corpus")
        kept.mkdir()
        for number, data in enumerate(target.corpus()):
            (kept / str(number)).write_bytes(data)
        tokens = Path(scratch, "tokens")
        tokens.write_text(
            "".join(f"{_quoted(token)}\n" for token in target.tokens), encoding="ascii"
        )
        options = {
            "runs": -(-arguments.runs // _JOBS),
            "max_total_time": arguments.seconds,
            "max_len": _MOST_NBYTES,
            "timeout": _SLOWEST_INPUT_S,
            "rss_limit_mb": _MOST_MIB,
            "artifact_prefix": f"{_ARTIFACTS}/{name}-",
            "print_final_stats": 1,
            **({"dict": tokens} if target.tokens else {}),
        }
        logs = [_ARTIFACTS / f"{name}-{number}.log" for number in range(_JOBS)]
        workers = [
            _worker(name, number + arguments.seed * _JOBS, options, [grown, kept], log)
            for number, log in enumerate(logs)
        ]
        statuses = [worker.wait() for worker in workers]
    said = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    executions = [_last(_EXECUTIONS, text) for text in said]
    wrong = [
        f"FINDING: see {log}"
        for log, status, count in zip(logs, statuses, executions, strict=True)
        if status or not count
    ]
    coverage = max(_last(_COVERAGE, text) for text in said)
    return sum(executions), "; ".join(wrong) or f"cov {coverage}", not wrong


def _worker(
    name: str, seed: int, options: dict[str, Any], corpora: list[Path], log: Path
) -> subprocess.Popen[bytes]:
    """Start one of the processes that fuzz a target. All of them add new inputs to the first corpus."""
    given = {**options, "seed": seed + 1}  # libFuzzer takes 0 for a random one
    with log.open("wb") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "fuzz.worker", name),
                *(f"-{option}={value}" for option, value in given.items()),
                *map(str, corpora),
            ],
            env={**os.environ, "TMPDIR": str(corpora[-1].parent)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _last(pattern: re.Pattern[str], text: str) -> int:
    """Return the last number in a log that matches, or 0 if no number does."""
    return int((pattern.findall(text) or ["0"])[-1])


def _harnessed(name: str, arguments: argparse.Namespace) -> tuple[int, str, bool]:
    """Build and run a harness in C under the sanitizers."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--timeout", "0"),
            *("tests/native/test_fuzz.py", "-k", f"misjudged and {name.removeprefix(_PREFIX)}"),
        ],
        cwd=_ROOT,
        env={
            **os.environ,
            "FUZZ_INPUTS": str(arguments.runs),
            "FUZZ_SEED": str(arguments.seed),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    is_right = done.returncode == 0 and " passed" in done.stdout
    log = _ARTIFACTS / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stdout, encoding="utf-8")
    said = "ASan, UBSan" if is_right else f"FINDING: see {log}"
    return arguments.runs if is_right else 0, said, is_right


def _quoted(token: bytes) -> str:
    """Return a token as libFuzzer's dictionaries have it."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in token) + '"'


if __name__ == "__main__":
    sys.exit(main())
