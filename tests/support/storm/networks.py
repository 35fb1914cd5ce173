"""Several hosts on one machine: network namespaces, each with a cable to one bridge."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from typing import Self

import pytest


class Network:
    """A bridge on this host and `hosts` other hosts. It needs root. Not thread-safe.

    A process may have one network at a time.
    """

    def __init__(self, hosts: int) -> None:
        pid = os.getpid()
        self._bridge = f"hst{pid}"
        self._names = [f"hst{pid}h{host}" for host in range(hosts)]
        self._prefix = f"198.18.{pid % 256}"
        self._made = ExitStack()

    @property
    def address(self) -> str:
        """The address of this host on the bridge."""
        return f"{self._prefix}.1"

    def address_of(self, host: int) -> str:
        return f"{self._prefix}.{host + 2}"

    def command_on(self, host: int, command: list[str]) -> list[str]:
        """Return a command that runs `command` on a host, without a further process."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def cut(self, host: int) -> None:
        """Cut the cable of a host. The ends of its connections are not notified."""
        _ip("link", "set", self._names[host], "down")

    def heal(self, host: int) -> None:
        _ip("link", "set", self._names[host], "up")

    def __enter__(self) -> Self:
        with ExitStack() as made:
            try:
                _ip("link", "add", self._bridge, "type", "bridge")
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network of several hosts here: {error}")
            made.callback(_ip, "link", "del", self._bridge)
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host, name in enumerate(self._names):
                _ip("netns", "add", name)
                made.callback(_ip, "netns", "del", name)
                _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
                made.callback(_ip, "link", "del", name)
                _ip("link", "set", name, "master", self._bridge, "up")
                _ip("-n", name, "address", "add", f"{self.address_of(host)}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
            self._made = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)  # noqa: S607
