"""Memory limits of a process, in simulated trees of control groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hicache_storage.host_pool import HostPool, PageShape, memory
from hicache_storage.host_pool.memory_limits import available_memory

GIB = 1 << 30
MACHINE = 64 * GIB
UNLIMITED_V1 = "9223372036854771712"


class Tree:
    """A simulated /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {MACHINE >> 10} kB\nHugePages: 0"
        )

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="ascii")

    def inside(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "\n".join(lines))

    def v2(
        self,
        group: str,
        *,
        most: int | str = "max",
        high: int | str = "max",
        used: int = 0,
        cache: int = 0,
    ) -> None:
        at = f"sys/fs/cgroup/{group}"
        self.write(f"{at}/memory.max", str(most))
        self.write(f"{at}/memory.high", str(high))
        self.write(f"{at}/memory.current", str(used))
        half = cache // 2
        self.write(f"{at}/memory.stat", f"anon 1\nactive_file {half}\ninactive_file {half}\nx y z")

    def v1(self, group: str, *, most: int | str, used: int = 0, cache: int = 0) -> None:
        at = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{at}/memory.limit_in_bytes", str(most))
        self.write(f"{at}/memory.usage_in_bytes", str(used))
        self.write(f"{at}/memory.stat", f"inactive_file 7\ntotal_inactive_file {cache}")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


class TestVersion2:
    def test_an_unlimited_group_has_the_machines_memory(self, tree: Tree) -> None:
        tree.inside("0::/pod")
        tree.v2("pod", used=3 * GIB)

        assert available_memory(tree.root) == (MACHINE, "on this machine")

    def test_the_unused_part_of_a_limit_is_available(self, tree: Tree) -> None:
        tree.inside("0::/pod")
        tree.v2("pod", most=8 * GIB, used=3 * GIB)

        assert available_memory(tree.root) == (
            5 * GIB,
            "in control group /pod, which is limited to 8 GiB",
        )

    def test_the_lowest_limit_may_be_that_of_a_parent(self, tree: Tree) -> None:
        tree.inside("0::/kube/pod/container")
        tree.v2("kube", most=100 * GIB, used=20 * GIB)
        tree.v2("kube/pod", most=10 * GIB, used=9 * GIB)
        tree.v2("kube/pod/container", most=8 * GIB, used=1 * GIB)

        assert available_memory(tree.root).nbytes == 1 * GIB
        assert "group /kube/pod," in available_memory(tree.root).where

    def test_in_a_namespace_of_its_own_the_mount_is_the_group(self, tree: Tree) -> None:
        tree.inside("0::/")
        tree.v2("", most=4 * GIB, used=1 * GIB)

        assert available_memory(tree.root) == (
            3 * GIB,
            "in control group /, which is limited to 4 GiB",
        )

    def test_a_path_outside_of_the_mount_is_not_followed(self, tree: Tree) -> None:
        tree.inside("0::/../../secret")
        tree.v2("", most=4 * GIB)
        tree.write("sys/secret/memory.max", "1")

        assert available_memory(tree.root).nbytes == 4 * GIB

    def test_the_file_cache_counts_as_available(self, tree: Tree) -> None:
        tree.inside("0::/pod")
        tree.v2("pod", most=8 * GIB, used=8 * GIB, cache=6 * GIB)

        assert available_memory(tree.root).nbytes == 6 * GIB

    def test_memory_high_is_a_limit(self, tree: Tree) -> None:
        tree.inside("0::/pod")
        tree.v2("pod", most=8 * GIB, high=6 * GIB, used=1 * GIB)

        assert available_memory(tree.root).nbytes == 5 * GIB

    def test_a_group_above_its_limit_has_nothing_available(self, tree: Tree) -> None:
        tree.inside("0::/pod")
        tree.v2("pod", most=2 * GIB, used=3 * GIB)

        assert available_memory(tree.root).nbytes == 0

    def test_a_limit_above_the_machines_memory_has_no_effect(self, tree: Tree) -> None:
        tree.inside("0::/pod")
        tree.v2("pod", most=10 * MACHINE)

        assert available_memory(tree.root) == (MACHINE, "on this machine")


class TestVersion1:
    def test_the_unused_part_of_a_limit_is_available(self, tree: Tree) -> None:
        tree.inside("5:cpu,cpuacct:/other", "4:hugetlb,memory:/docker/1", "0::/")
        tree.v1("", most=UNLIMITED_V1, used=40 * GIB)
        tree.v1("docker", most=UNLIMITED_V1)
        tree.v1("docker/1", most=8 * GIB, used=5 * GIB, cache=2 * GIB)

        assert available_memory(tree.root).nbytes == 5 * GIB
        assert "/docker/1," in available_memory(tree.root).where

    def test_an_unlimited_group_has_the_machines_memory(self, tree: Tree) -> None:
        tree.inside("4:memory:/")
        tree.v1("", most=UNLIMITED_V1, used=40 * GIB)

        assert available_memory(tree.root) == (MACHINE, "on this machine")

    def test_a_container_that_sees_the_hosts_path_is_its_mount(self, tree: Tree) -> None:
        tree.inside("4:memory:/docker/1")
        tree.v1("", most=8 * GIB, used=5 * GIB)

        assert available_memory(tree.root).nbytes == 3 * GIB


@pytest.mark.parametrize("lines", [[], ["nonsense"], ["0::/gone"], ["3:memory:/gone"]])
def test_a_process_in_no_known_group_has_the_machines_memory(tree: Tree, lines: list[str]) -> None:
    assert available_memory(tree.root) == (MACHINE, "on this machine")
    tree.inside(*lines)

    assert available_memory(tree.root) == (MACHINE, "on this machine")


def test_a_pool_that_does_not_fit_into_its_container_is_refused(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the kernel would kill the process without a message at its first use of the memory."""
    tree.inside("0::/pod")
    tree.v2("pod", most=8 << 20, used=5 << 20)
    monkeypatch.setattr(memory, "available_memory", partial(available_memory, tree.root))
    shape = PageShape.mla(page_tokens=1, layers=1, kv_dim=1 << 20, dtype="uint8")

    HostPool(shape, slots=3).close()
    with pytest.raises(MemoryError, match=r"pool of 4 MiB .* 3 MiB .*/pod.*fewer.*--host-size"):
        HostPool(shape, slots=4)
