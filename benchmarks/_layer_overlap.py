"""Compare two orders: copy the next layers while a layer is computed, or copy and compute in turn."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
from _device_workload import LAYERS
from _harness import Aim, Candidate, console

from hicache_storage.device_pool import LayerCopier

if TYPE_CHECKING:
    from _device_workload import Workload
    from _harness import Report, Section

    from hicache_storage.device_pool import LayerTransfer

STEPS = [(pool, layer) for pool, count in enumerate(LAYERS.values()) for layer in range(count)]
FACTORS = {"cuda": (4096, torch.bfloat16), "cpu": (256, torch.float32)}
"""The side length and type of the square matrices that a device multiplies."""
IN_TURN = "copy, then compute"
LEAST_SPEEDUP = 1.3


class LayerKernels:
    """The kernels of a layer: they add up the layer's pages, and multiply matrices."""

    def __init__(self, workload: Workload) -> None:
        side, dtype = FACTORS[workload.device.type]
        self.products = 0
        """How many matrix products each layer computes."""
        self._workload = workload
        self._slots = torch.tensor(workload.device_slots, device=workload.device)
        self._factor = torch.randn(side, side, device=workload.device).to(dtype)
        self._product = torch.empty_like(self._factor)
        self._sum = torch.zeros((), dtype=torch.int64, device=workload.device)

    def reset(self) -> None:
        self._sum.zero_()

    def start(self, pool: int, layer: int) -> None:
        for on_device, _ in self._workload.pools[pool].planes(layer):
            self._sum += on_device.index_select(0, self._slots).sum()
        self.multiply(self.products)

    def multiply(self, count: int) -> None:
        for _ in range(count):
            torch.matmul(self._factor, self._factor, out=self._product)

    def start_all(self) -> None:
        for pool, layer in STEPS:
            self.start(pool, layer)

    def check(self) -> None:
        """Raise an exception unless the kernels have read the pages of L2."""
        expected = sum(int(in_host[slots].sum()) for _, in_host, slots in self._workload.layers())
        if (expected - int(self._sum)) % (1 << 64):
            raise RuntimeError("the kernels have read other bytes than those of L2")


class _Method(Candidate):
    """One order of copies and kernels."""

    def __init__(self, workload: Workload, copier: LayerCopier, kernels: LayerKernels) -> None:
        self.workload = workload
        self.kernels = kernels
        self._copier = copier

    def load(self) -> LayerTransfer:
        return self._copier.load(self.workload.host_slots, self.workload.device_slots)

    def prepare(self, turn: int) -> None:
        self.workload.fill(turn, hosts=True)
        self.kernels.reset()
        self.workload.finish()

    def check(self) -> None:
        self.kernels.check()


class _CopyAlone(_Method):
    name = "copy alone"

    def run(self) -> None:
        self.load().settled.result()

    def check(self) -> None:
        if not self.workload.is_same():
            raise RuntimeError("the load did not copy what it should")


class _ComputeAlone(_Method):
    name = "compute alone"

    def prepare(self, turn: int) -> None:
        super().prepare(turn)
        self.load().settled.result()

    def run(self) -> None:
        self.kernels.start_all()
        self.workload.finish()


class _InTurn(_Method):
    name = IN_TURN

    def run(self) -> None:
        self.load().settled.result()
        self.kernels.start_all()
        self.workload.finish()


class _LayerByLayer(_Method):
    name = "ours: layer by layer"

    def run(self) -> None:
        transfer = self.load()
        for pool, layer in STEPS:
            transfer.wait(layer, pool=pool)
            self.kernels.start(pool, layer)
        self.workload.finish()
        transfer.settled.result()


def measure_overlap(report: Report, workload: Workload, rounds: int) -> None:
    """Add a table in which a layer's kernels take about as long as its copies."""
    kernels = LayerKernels(workload)
    with LayerCopier(workload.pools) as copier:
        kinds = (_CopyAlone, _ComputeAlone, _InTurn, _LayerByLayer)
        methods = [kind(workload, copier, kernels) for kind in kinds]
        kernels.products = _products(methods[0], methods[1])
        section = report.measure(
            f"compute while loading, {workload.name}, {kernels.products} products a layer",
            methods,
            rounds,
            work=len(STEPS),
            unit="layers/s",
            baselines=[IN_TURN],
        )
    console.print(f"hidden: {_hidden(section):.0%} of the shorter of copy and compute\n")
    if workload.device.type == "cuda":  # a CPU has no cores that only compute
        speedup = section.ratio(_LayerByLayer.name, IN_TURN)
        report.aims.append(
            Aim("layer by layer against one after the other", LEAST_SPEEDUP, speedup)
        )


def _products(copy: _Method, compute: _Method) -> int:
    """Return how many products per layer make computing take about as long as copying."""
    copy_s = _median_s(copy)
    read_s = _median_s(compute)
    count = 20
    compute.kernels.multiply(count)
    compute.workload.finish()
    began_s = time.perf_counter()
    compute.kernels.multiply(count)
    compute.workload.finish()
    product_s = (time.perf_counter() - began_s) / count
    return max(1, round((copy_s - read_s) / len(STEPS) / product_s))


def _median_s(method: _Method) -> float:
    taken_s: list[float] = []
    for turn in range(3):
        method.prepare(turn)
        began_s = time.perf_counter()
        method.run()
        taken_s.append(time.perf_counter() - began_s)
    return statistics.median(taken_s)


def _hidden(section: Section) -> float:
    """Return the time that overlapping saved, as a share of the shorter of copy and compute."""
    names = (_CopyAlone.name, _ComputeAlone.name, IN_TURN, _LayerByLayer.name)
    rounds = zip(*(section.seconds[name] for name in names), strict=True)
    parts: list[float] = [
        (in_turn_s - layered_s) / min(copy_s, compute_s)
        for copy_s, compute_s, in_turn_s, layered_s in rounds
    ]
    return statistics.median(parts)
