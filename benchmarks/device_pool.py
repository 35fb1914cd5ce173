"""Compare copies between L1 and L2, target and draft together, with one plain copy of the same bytes.

python benchmarks/device_pool.py [--device cuda] [--pages N] [--layouts page_first,...]
[--stop-after SECONDS] [--json FILE]

The first table computes each layer while the next ones are copied. The program runs on CUDA if torch
finds it, else on the CPU, where the "device" is host memory, too.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch
from _device_workload import LAYERS, Workload
from _harness import Candidate, Parser, Report, console, names
from _layer_overlap import measure_overlap

from hicache_storage.device_pool import LayerCopier
from hicache_storage.host_pool import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = "one copy"


class TransferMethod(Candidate):
    """One way to copy all pages in one direction."""

    def __init__(self, name: str, workload: Workload, *, loads: bool) -> None:
        self.name = name
        self.workload = workload
        self.loads = loads

    def prepare(self, turn: int) -> None:
        self.workload.fill(turn, hosts=self.loads)

    def check(self) -> None:
        if not self.workload.is_same():
            raise RuntimeError(f"{self.name} did not copy what it should")

    def close(self) -> None:
        """Stop threads."""


class OneCopy(TransferMethod):
    """One copy of as many bytes as all pages have, in one piece, from or to pinned memory."""

    def __init__(self, workload: Workload, *, loads: bool) -> None:
        super().__init__(LIMIT, workload, loads=loads)
        pinned = workload.device.type == "cuda"
        here = torch.ones(workload.nbytes, dtype=torch.uint8, pin_memory=pinned)
        there = torch.zeros(workload.nbytes, dtype=torch.uint8, device=workload.device)
        self._source, self._target = (here, there) if loads else (there, here)

    def prepare(self, turn: int) -> None:
        self._source.fill_(turn % 256)
        self._target.fill_(255)
        self.workload.finish()

    def run(self) -> None:
        self._target.copy_(self._source, non_blocking=True)
        self.workload.finish()

    def check(self) -> None:
        if not torch.equal(self._source.cpu(), self._target.cpu()):
            raise RuntimeError("one copy did not copy")


class CopyAPage(TransferMethod):
    """One copy for every page, plane and layer, in order, on the current stream."""

    def __init__(self, workload: Workload, *, loads: bool) -> None:
        super().__init__("a copy a page and layer", workload, loads=loads)

    def run(self) -> None:
        for on_device, in_host, slots in self.workload.layers():
            for device_slot, host_slot in zip(self.workload.device_slots, slots, strict=True):
                ends = on_device[device_slot], in_host[host_slot]
                target, source = ends if self.loads else reversed(ends)
                target.copy_(source, non_blocking=True)
        self.workload.finish()


class Ours(TransferMethod):
    """Copies by `LayerCopier`. The time of the first layer is recorded, too."""

    def __init__(self, workload: Workload, *, loads: bool) -> None:
        super().__init__("ours: LayerCopier", workload, loads=loads)
        self._copier = LayerCopier(workload.pools)
        self.first_layer_s: list[float] = []

    def run(self) -> None:
        began_s = time.perf_counter()
        workload = self.workload
        if self.loads:
            transfer = self._copier.load(workload.host_slots, workload.device_slots)
        else:
            transfer = self._copier.store(workload.device_slots, workload.host_slots)
        transfer.wait(0)
        if workload.device.type == "cuda":  # on CUDA, `wait` holds the stream, not the thread
            torch.cuda.current_stream(workload.device).synchronize()
        self.first_layer_s.append(time.perf_counter() - began_s)
        transfer.settled.result()

    def close(self) -> None:
        self._copier.close()


def measure(report: Report, workload: Workload, rounds: int, *, loads: bool) -> None:
    ours = Ours(workload, loads=loads)
    compared: list[TransferMethod] = [
        OneCopy(workload, loads=loads),
        CopyAPage(workload, loads=loads),
        ours,
    ]
    direction = "L2 → L1" if loads else "L1 → L2"
    section = report.measure(
        f"{direction}, {workload.name}",
        compared,
        rounds,
        work=workload.nbytes / 1e9,
        baselines=[LIMIT],
    )
    whole_s = statistics.median(section.seconds[ours.name])
    first_s = statistics.median(ours.first_layer_s[1:])
    console.print(f"first of {sum(LAYERS.values())} layers: {first_s / whole_s:.0%} of the time\n")
    for method in compared:
        method.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__, rounds=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pages", type=int, default=16, help="of 8 MiB (default: %(default)s)")
    parser.add_argument("--layouts", type=names, default=list(LAYOUTS), help="of L2 (default: all)")
    parser.add_argument(
        "--stop-after",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="start no further table after that time",
    )
    options = parser.parsed(arguments)
    device = torch.device(options.device)
    named = {"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    report = Report.begin(distributions=["torch"], facts=named)
    began_s = time.monotonic()
    for layout in options.layouts:
        workload = Workload(layout, options.pages, device)
        if layout == options.layouts[0]:
            measure_overlap(report, workload, options.rounds)
        for loads in (True, False):
            if options.json:  # so that a run that is ended early leaves the tables that it has
                report.write(options.json)
            if time.monotonic() - began_s < options.stop_after:
                measure(report, workload, options.rounds, loads=loads)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
