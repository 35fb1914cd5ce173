"""`hicache bench`: it puts load on a store, reports figures, and leaves no page behind."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_stores import CliStore, run_json, save
from composed_stores import file_member
from servers import RedisServer, S3Server, wait_until
from stores import HookedStorage
from verb_processes import interrupted, on_terminal, slow_store, verb

from hicache_storage.cli import main
from hicache_storage.cli.operations.bench.comparison import TOLERANCES, compare, read_before
from hicache_storage.cli.operations.bench.latencies import Latencies
from hicache_storage.cli.operations.bench.load import BenchSettings, Operation
from hicache_storage.cli.operations.bench.pages import PageBuffers, bench_space
from hicache_storage.cli.operations.bench.run import FORMAT, run_bench
from hicache_storage.cli.progress import Meter
from hicache_storage.errors import ConfigError
from hicache_storage.page_store import PageStore, Verdict

_SMALL = ("--page-bytes", "4KiB", "--working-set", "64KiB", "--batch-pages", "4", "--threads", "2")
_SHORT = (*_SMALL, "--pages", "200")


def _report(tmp_path: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the report of a run."""
    path = tmp_path / "report.json"
    code = main(["bench", *argv, "--json", str(path)])
    return code, json.loads(path.read_text())


def _settings(**changes: Any) -> BenchSettings:
    fields: dict[str, Any] = {
        "page_sizes": (512,),
        "page_tokens": 16,
        "threads": (2,),
        "batch_pages": 4,
        "mix": {Operation.READ: 1.0, Operation.WRITE: 1.0, Operation.LOOK_UP: 1.0},
        "duration_s": None,
        "pages": 200,
        "working_set_nbytes": 16 * 512,
        "timeout_s": 10.0,
    }
    return BenchSettings(**{**fields, **changes})


@contextmanager
def _no_meter(title: str, duration_s: float | None) -> Generator[Meter, None, None]:
    yield Meter()


def _pages(storage: HookedStorage) -> int:
    return sum(len(pages) for pages in storage.inner._spaces.values())


def test_each_operation_has_figures(store: CliStore, tmp_path: Path) -> None:
    code, report = _report(tmp_path, *_SHORT, *store.flags)

    (load,) = report["loads"]
    assert (0, []) == (code, report["problems"])
    assert {"read", "write", "look-up", "delete"} == {*load["operations"]}
    assert 200 == sum(
        figures["verdicts"]["ok"]
        for operation, figures in load["operations"].items()
        if operation != "delete"
    )
    for figures in load["operations"].values():
        assert {"ok": figures["verdicts"]["ok"]} == figures["verdicts"]
        assert 0 < figures["p50_s"] <= figures["p99_s"] <= figures["p999_s"]
    assert load["cpu_s_per_gb"] > 0


def test_no_page_and_no_key_space_is_left_behind(
    store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = store.fill(range(2))
    _report(tmp_path, *_SHORT, *store.flags)
    capsys.readouterr()

    _, found = run_json(capsys, "ls", *store.flags)

    assert [(kept.id, 2)] == [(one["id"], one["pages"]) for one in found["spaces"]]


def test_the_pages_of_another_run_keep_its_key_space(file_store: CliStore, tmp_path: Path) -> None:
    with file_store.open() as storage:
        other = save(storage, range(3), bench_space(4096, 64))

    _report(tmp_path, *_SHORT, *file_store.flags)

    assert [0, 1, 2] == file_store.numbers(other)


def test_each_page_size_and_number_of_threads_is_a_load(
    file_store: CliStore, tmp_path: Path
) -> None:
    more = ("--page-bytes", "512", "--threads", "3", "--mix", "read=1")

    code, report = _report(tmp_path, *_SHORT, *more, *file_store.flags)

    assert code == 0
    assert [(4096, 2), (4096, 3), (512, 2), (512, 3)] == [
        (load["page_nbytes"], load["threads"]) for load in report["loads"]
    ]
    assert all(["read"] == [*load["operations"]] for load in report["loads"])


def test_a_rate_is_not_exceeded(file_store: CliStore, tmp_path: Path) -> None:
    flags = ("--duration", "1.2s", "--rate", "40")

    code, report = _report(tmp_path, *_SMALL, *flags, *file_store.flags)

    (load,) = report["loads"]
    pages = sum(
        sum(figures["verdicts"].values())
        for operation, figures in load["operations"].items()
        if operation != "delete"
    )
    assert (0, 40) == (code, report["settings"]["rate_pages_per_s"])
    # The first call does not wait.
    assert 4 <= pages <= 40 * load["elapsed_s"] + 4
    assert load["operations"]["read"]["slowest_s_series"][0][1] > 0


def test_a_load_ends_in_time_although_its_next_call_is_due_later(
    file_store: CliStore, tmp_path: Path
) -> None:
    flags = ("--duration", "500ms", "--rate", "1", "--mix", "read=1", "--batch-pages", "16")

    _, report = _report(tmp_path, *_SMALL, *flags, *file_store.flags)

    (load,) = report["loads"]
    assert 1 == load["operations"]["read"]["calls"]
    assert load["elapsed_s"] < 12  # the second call is due after 16 s


def test_runs_of_different_rates_are_not_compared(
    file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _report(tmp_path, *_SHORT, *file_store.flags)
    before = ["--compare", str(tmp_path / "report.json")]

    assert main(["bench", *_SHORT, "--rate", "10", *before, *file_store.flags]) == 2
    assert "rate_pages_per_s was None" in capsys.readouterr().err


def test_a_load_lasts_as_long_as_it_is_told(file_store: CliStore, tmp_path: Path) -> None:
    _, report = _report(tmp_path, *_SMALL, "--duration", "1.2s", *file_store.flags)

    (load,) = report["loads"]
    assert 1.2 <= load["elapsed_s"] < 60
    assert load["operations"]["read"]["series"][0][1] > 0


def test_pages_are_those_of_the_model(file_store: CliStore, tmp_path: Path) -> None:
    flags = ("--model", "deepseek-v3", "--page-size", "1", "--working-set", "1", "--pages", "20")

    _, report = _report(tmp_path, *flags, *file_store.flags)

    assert [61 * 576 * 2] == [load["page_nbytes"] for load in report["loads"]]


def test_reports_hold_no_secret(
    store_of: Callable[[str], CliStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "load.html"

    _, report = _report(tmp_path, *_SHORT, "--html", str(page), *store_of("s3").flags)

    for text in (json.dumps(report), page.read_text(), capsys.readouterr().out):
        assert S3Server.secret_key not in text


def test_a_store_that_is_full_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RedisServer(tmp_path, "--maxmemory", "1") as server:
        argv = ["bench", *_SHORT, *CliStore("redis", {"url": server.url}).flags]
        assert main(argv) == 2
        assert "the store has 0 B free" in capsys.readouterr().err
        code = main([*argv, "--evict"])

    assert code == 1
    assert "! filling: 16 of 16 pages: refused" in capsys.readouterr().out


def test_a_store_that_dies_under_load_is_a_finding(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        store = CliStore("redis", {"url": server.url, "timeout_s": 1, "prefix": "kv:"})
        flags = (*_SMALL, "--duration", "3s", "--timeout", "1s", *store.flags)
        with verb(tmp_path, "bench", *flags) as process:
            with store.open() as storage:
                wait_until(lambda: any(next(storage.scan(s), None) for s in storage.spaces()))
            server.stop()
            output, errors = process.communicate(timeout=60)

    assert process.returncode == 1
    assert all(line.startswith("hicache: warning: ") for line in errors.splitlines())
    assert "unavailable" in output
    assert "pages may be left" in output


def test_calls_that_hang_time_out_and_are_counted() -> None:
    storage = HookedStorage()
    measured = threading.Event()

    def hang(answer: Callable[[], Any]) -> Any:
        assert measured.wait(60)
        return answer()

    @contextmanager
    def meter(title: str, duration_s: float | None) -> Generator[Meter, None, None]:
        yield Meter()
        if "threads" in title:
            measured.set()

    storage.hooks["batch_get"] = hang
    settings = _settings(timeout_s=0.2, pages=None, duration_s=1.0, mix={Operation.READ: 1.0})

    report = run_bench(storage, settings, threading.Event(), meter)

    figures = report["loads"][0]["operations"]["read"]
    assert figures["verdicts"]["timeout"] >= 4
    assert figures["p50_s"] >= 0.19
    assert any(problem.startswith("read: ") for problem in report["problems"])
    assert 0 == _pages(storage)


def test_a_page_that_comes_back_wrong_is_a_finding() -> None:
    storage = HookedStorage()

    def flip(answer: Callable[[], Any]) -> Any:
        for pages in storage.inner._spaces.values():
            for data in pages.values():
                data[-1] ^= 1
        return answer()

    storage.hooks["batch_get"] = flip
    settings = _settings(threads=(1,), pages=4, mix={Operation.READ: 1.0})

    report = run_bench(storage, settings, threading.Event(), _no_meter)

    assert ["read: 4 pages: corrupt"] == report["problems"]


def test_a_page_with_the_bytes_of_another_one_is_wrong() -> None:
    space = bench_space(512, 16)
    first, second = (digit * 64 for digit in "ab")
    with PageStore(HookedStorage()) as store:
        store.open_space(space)
        buffers = PageBuffers(store, space, 1)
        buffers.to_write([first])

        assert [Verdict.OK] == buffers.proved([first], [Verdict.OK])
        assert [Verdict.CORRUPT] == buffers.proved([second], [Verdict.OK])


def test_a_store_holds_at_most_twice_the_working_set() -> None:
    storage = HookedStorage()
    held: list[int] = []

    def count(answer: Callable[[], Any]) -> Any:
        done = answer()
        held.append(_pages(storage))
        return done

    storage.hooks["batch_set"] = count
    settings = _settings(threads=(2, 1), pages=400, mix={Operation.WRITE: 1.0})

    run_bench(storage, settings, threading.Event(), _no_meter)

    assert 16 < max(held) <= 32
    assert 0 == _pages(storage)


def test_pages_that_stay_are_a_finding() -> None:
    storage = HookedStorage()
    storage.hooks["batch_delete"] = lambda _: [False] * 16

    report = run_bench(storage, _settings(mix={Operation.READ: 1.0}), threading.Event(), _no_meter)

    (problem,) = report["problems"]
    assert problem.startswith("16 pages may be left")


def test_ctrl_c_prints_the_figures_and_leaves_no_page(file_store: CliStore, tmp_path: Path) -> None:
    slow = slow_store(file_store, tmp_path)
    flags = (*_SMALL, "--duration", "60s", "--mix", "read=1,write=1", "--json", "report.json")

    code, _, errors = interrupted(tmp_path, "bench", *flags, *slow.flags)

    assert (130, "") == (code, errors)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["interrupted"]
    assert report["loads"][0]["elapsed_s"] < 50
    with file_store.open() as storage:
        assert [] == [info for space in storage.spaces() for info in storage.scan(space)]


def test_the_tables_fit_80_columns(
    file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    main(["bench", *_SHORT, "--json", str(before), *file_store.flags])
    main(["bench", *_SHORT, "--compare", str(before), *file_store.flags])

    output = capsys.readouterr().out
    assert "4 KiB pages, 2 threads" in output
    assert max(map(len, output.splitlines())) <= 80


def test_a_terminal_shows_progress(file_store: CliStore, tmp_path: Path) -> None:
    code, output = on_terminal(tmp_path, "", "bench", *_SHORT, *file_store.flags)

    assert code == 0
    assert "filling" in output


class TestCompare:
    """Runs that are compared with an earlier run."""

    @pytest.fixture
    def before(self, file_store: CliStore, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
        path = tmp_path / "before.json"
        assert main(["bench", *_SHORT, "--json", str(path), *file_store.flags]) == 0
        return path, json.loads(path.read_text())

    def test_a_slower_run_is_a_finding(
        self,
        before: tuple[Path, dict[str, Any]],
        file_store: CliStore,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        path, report = before
        for figures in report["loads"][0]["operations"].values():
            figures["p99_s"] = 1e-7
        path.write_text(json.dumps(report))

        code = main(
            [
                *("bench", *_SHORT, "--compare", str(path), *file_store.flags),
                *("--tolerance", "100000%", "--tolerance", "p99=50%"),
            ]
        )

        assert code == 1
        assert "worse than tolerated: 4 of 17 figures" in capsys.readouterr().out

    def test_a_run_within_the_tolerance_is_fine(
        self, before: tuple[Path, dict[str, Any]], file_store: CliStore
    ) -> None:
        flags = ("--compare", str(before[0]), "--tolerance", "100000%")

        assert main(["bench", *_SHORT, *flags, *file_store.flags]) == 0

    def test_another_mix_is_refused_before_the_run(
        self,
        before: tuple[Path, dict[str, Any]],
        file_store: CliStore,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        capsys.readouterr()
        flags = ("--compare", str(before[0]), "--mix", "read=1")

        assert main(["bench", *_SHORT, *flags, *file_store.flags]) == 2

        printed = capsys.readouterr()
        assert printed.out == ""
        assert "--compare: mix was" in printed.err


def test_the_page_is_self_contained(file_store: CliStore, tmp_path: Path) -> None:
    path = tmp_path / "load.html"
    flags = (*_SMALL, "--duration", "2.1s", "--html", str(path))

    main(["bench", *flags, *file_store.flags])

    page = path.read_text()
    assert page.count("<svg ") == 3
    assert "Slowest call over time" in page
    assert "default-src 'none'" in page
    assert not re.search(r"<script|https?://|\bsrc=|url\(", page)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--mix", "70:20:10"], "must be weights like read=70,write=20,look-up=10"),
        (["--mix", "read=1,read=2"], "each name at most once"),
        (["--mix", "read=0"], "must have at least one weight above 0"),
        (["--tolerance", "p98=5%"], "--tolerance: must be a share such as 20%"),
        (["--threads", "0"], "--threads: must be a whole number"),
        (["--duration", "0s"], "--duration: must be a time"),
        (["--duration", "1s", "--pages", "5"], "not allowed with"),
        (["--page-bytes", "0"], "--page-bytes: must be at least one byte"),
        (["--json", "/no/such/file.json"], "there is no directory /no/such"),
        (["--page-bytes", "1B", "--working-set", "1TB"], "has 1,000,000,000,000 pages, but"),
        (["--page-bytes", "1PB"], "does not have the memory: choose smaller or fewer pages"),
        (["--compare", "/no/such.json"], "--compare /no/such.json: cannot be read"),
    ],
)
def test_wrong_input_is_one_line(
    flags: list[str], reason: str, file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *file_store.flags, *flags]) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert reason in printed.err


# The ratios of two runs, and the reports that can be compared.


def _load(**changes: object) -> dict[str, Any]:
    return {**_run()["loads"][0], **changes}


def _run(**figures: float | None) -> dict[str, Any]:
    read = {"pages_per_s": 100.0, "p50_s": 0.001, "p99_s": 0.002, "p999_s": 0.003}
    cpu = figures.pop("cpu_s_per_gb", 1.0)
    operations = {"read": {**read, **figures}}
    load = {"page_nbytes": 512, "threads": 2, "operations": operations, "cpu_s_per_gb": cpu}
    return {"loads": [load]}


def _worse(after: dict[str, Any]) -> list[str]:
    return [cell.metric for cell in compare(_run(), after, TOLERANCES) if cell.worse]


def test_equal_runs_have_ratios_of_one() -> None:
    assert {1.0} == {cell.ratio for cell in compare(_run(), _run(), TOLERANCES)}
    assert [] == _worse(_run())


@pytest.mark.parametrize(
    ("figures", "worse"),
    [
        ({"pages_per_s": 81.0}, []),
        ({"pages_per_s": 79.0}, ["throughput"]),
        ({"pages_per_s": 500.0}, []),
        ({"p50_s": 0.00124}, []),
        ({"p50_s": 0.00126}, ["p50"]),
        ({"p50_s": 0.0001}, []),
        ({"p99_s": 0.0031}, ["p99"]),
        ({"p999_s": 0.0059}, []),
        ({"p999_s": 0.0061}, ["p99.9"]),
        ({"cpu_s_per_gb": 1.3}, ["cpu"]),
        ({"pages_per_s": 0.0, "p50_s": None}, ["throughput", "p50"]),
    ],
)
def test_a_figure_beyond_its_tolerance_is_worse(
    figures: dict[str, float | None], worse: list[str]
) -> None:
    assert worse == _worse(_run(**figures))


def test_an_operation_that_is_gone_is_worse() -> None:
    after = _run()
    after["loads"][0]["operations"] = {}

    assert ["throughput", "p50", "p99", "p99.9"] == _worse(after)


def test_runs_without_a_common_load_are_refused() -> None:
    after = _run()
    after["loads"][0]["threads"] = 3

    with pytest.raises(
        ConfigError, match="no page size was measured with the same number of threads"
    ):
        compare(_run(), after, TOLERANCES)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a report"),
        ('{"loads": []}', "is not a report"),
        ('{"format": 9, "loads": [], "settings": {}}', "another version"),
        (f'{{"format": {FORMAT}, "loads": [], "settings": []}}', "is not a report"),
        (f'{{"format": {FORMAT}, "loads": 5, "settings": {{}}}}', "is not a report"),
        (f'{{"format": {FORMAT}, "loads": [7], "settings": {{}}}}', "is not a whole report"),
        *(
            (
                json.dumps({"format": FORMAT, "settings": {}, "loads": [_load(**wrong)]}),
                "is not a whole report",
            )
            for wrong in (
                {"operations": None},
                {"operations": {"read": {"p50_s": 1}}},
                {"threads": "2"},
                {"cpu_s_per_gb": "1"},
                {"cpu_s_per_gb": 10**400},
                {"cpu_s_per_gb": float("nan")},
            )
        ),
    ],
)
def test_a_file_that_is_no_report_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=reason):
        read_before(path)


def test_a_whole_report_is_read(tmp_path: Path) -> None:
    report: dict[str, Any] = {"format": FORMAT, "settings": {}, "loads": [_load(cpu_s_per_gb=None)]}
    path = tmp_path / "before.json"
    path.write_text(json.dumps(report))

    assert report == read_before(path)


# Latencies in buckets.


def _of(*milliseconds: float) -> Latencies:
    latencies = Latencies()
    for each in milliseconds:
        latencies.add(each / 1000)
    return latencies


@pytest.mark.parametrize(("share", "expected_s"), [(0.5, 0.5), (0.99, 0.99), (0.999, 0.999)])
def test_percentiles_are_right_within_a_percent(share: float, expected_s: float) -> None:
    latencies = _of(*range(1, 1001))

    assert latencies.quantile(share) == pytest.approx(expected_s, rel=0.006)


def test_no_call_has_no_percentile() -> None:
    assert _of().quantile(0.5) is None
    assert _of().curve() == []


def test_merged_latencies_are_those_of_both() -> None:
    latencies = _of(*[1] * 99)
    latencies.merge(_of(100))

    assert latencies.count == 100
    assert latencies.quantile(0.99) == pytest.approx(0.001, rel=0.006)
    assert latencies.quantile(1) == pytest.approx(0.1, rel=0.006)


def test_a_curve_ends_where_the_calls_do() -> None:
    assert _of(*range(1, 101)).curve()[-1][0] <= 100
    assert _of(*range(1, 2001)).curve()[-1][0] == pytest.approx(1000)


class TestComposed:
    """The cost of a composition: its figures, those of its first part, and the ratios."""

    @pytest.fixture
    def composed(self, tmp_path: Path) -> CliStore:
        stripes = [file_member(name, tmp_path / name) for name in "ab"]
        tiers = [
            {"name": "nvme", "backend": "striped", "config": {"stripes": stripes}},
            file_member("bucket", tmp_path / "bucket"),
        ]
        return CliStore("tiered", {"tiers": tiers})

    def test_the_first_part_is_measured_in_the_same_run(
        self, composed: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, report = _report(tmp_path, *_SHORT, *composed.flags)

        alone = report["first_part"]
        assert (0, "nvme", 1) == (code, alone["name"], len(alone["loads"]))
        assert {"read", "write", "look-up", "delete"} == {*alone["loads"][0]["operations"]}
        assert "Ratios of the whole store to nvme alone:" in capsys.readouterr().out

    def test_a_ratio_is_that_of_the_whole_to_its_first_part(
        self, composed: CliStore, tmp_path: Path
    ) -> None:
        _, report = _report(tmp_path, *_SHORT, *composed.flags)

        speeds = [
            each["loads"][0]["operations"]["read"]["pages_per_s"]
            for each in (report, report["first_part"])
        ]
        (ratio,) = (
            each["ratio"]
            for each in report["first_part"]["ratios"]
            if (each["operation"], each["metric"]) == ("read", "throughput")
        )
        assert ratio == pytest.approx(speeds[0] / speeds[1])

    def test_no_page_is_left_in_any_tier(
        self, composed: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _report(tmp_path, *_SHORT, *composed.flags)
        capsys.readouterr()

        assert main(["ls", *composed.flags]) == 0
        assert capsys.readouterr().out.startswith("0 key spaces")

    def test_the_page_has_both(self, composed: CliStore, tmp_path: Path) -> None:
        page = tmp_path / "load.html"

        assert main(["bench", *_SHORT, *composed.flags, "--html", str(page)]) == 0
        assert "Ratios to nvme alone" in page.read_text()

    def test_a_plain_store_has_no_parts(self, file_store: CliStore, tmp_path: Path) -> None:
        _, report = _report(tmp_path, *_SHORT, *file_store.flags)

        assert "first_part" not in report
