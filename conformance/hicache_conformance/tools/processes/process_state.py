"""The state of a process as a whole: signal handlers, hooks, streams, settings."""

from __future__ import annotations

import asyncio
import builtins
import locale
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_MIN_VALUE_CHARS = 6
"""Values of a config are looked for from this length on: shorter ones may occur for other reasons."""

_OF_THE_C_LIBRARY = 0b11 << 31
"""Signals 32 and 33, which the C library catches when it first needs them for threads."""

State = dict[str, Any]
"""Values by the names that a message uses for them."""


def process_state() -> State:
    """Return the present state. Call this on the main thread."""
    return {
        **_signals(),
        **_interpreter(),
        **_replaceable_functions(),
        "the current directory": str(Path.cwd()),
        "the umask": _umask(),
        "the CPUs that it may run on": os.sched_getaffinity(0),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the default timeout of sockets": socket.getdefaulttimeout(),
        "the start method of multiprocessing": multiprocessing.get_start_method(allow_none=True),
        "the kind of event loop": _kind_of_loop(),
        "the handlers of the root logger": list(logging.root.handlers),
        "the level of the root logger": logging.root.level,
        "the level below which logging is disabled": logging.root.manager.disable,
    }


def changes(before: State, after: State) -> list[str]:
    """Return a sentence for each value that differs."""
    return [
        f"{name}: {_value_text(value)} before, {_value_text(after[name])} now"
        for name, value in before.items()
        if after[name] != value
    ]


def environment_changes(before: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each variable that was changed or removed, or is new with a config value.

    The sentences do not repeat values, because these may be secret.
    """
    now = dict(os.environ)
    found = [
        f"the environment variable {name} was {'changed' if name in now else 'removed'}"
        for name, value in before.items()
        if now.get(name) != value
    ]
    values = [one for one in config.values() if isinstance(one, str)]
    return found + [
        f"the environment variable {name} was made, with a value of the config"
        for name in sorted(now.keys() - before.keys())
        if any(len(value) >= _MIN_VALUE_CHARS and value in now[name] for value in values)
    ]


def hides_all_warnings(before: list[Any]) -> bool:
    """Return whether a new filter drops every warning, or an earlier filter was removed."""
    gone = [one for one in before if one not in warnings.filters]
    added = [one for one in warnings.filters if one not in before]
    blanket = [one for one in added if (one[0], one[1], one[3]) == ("ignore", None, None)]
    return bool(gone) or any(issubclass(Warning, one[2]) for one in blanket)


def _signals() -> State:
    state: State = {}
    for number in sorted(signal.valid_signals()):
        name = getattr(number, "name", str(number))
        state[f"the handler of {name}"] = signal.getsignal(number)
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    state["the wake-up descriptor of signals"] = wakeup
    state["the blocked signals"] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(("SigCgt:", "SigIgn:")):
            which = "caught" if line.startswith("SigCgt") else "ignored"
            mask = int(line.split()[1], 16) & ~_OF_THE_C_LIBRARY
            state[f"the mask of {which} signals"] = f"{mask:x}"
    return state


def _interpreter() -> State:
    return {
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "the switch interval of threads": sys.getswitchinterval(),
        "the recursion limit": sys.getrecursionlimit(),
    }


def _replaceable_functions() -> State:
    """Return the functions that monkey-patching libraries replace."""
    return {
        "socket.socket": socket.socket,
        "socket.getaddrinfo": socket.getaddrinfo,
        "threading.Thread": threading.Thread,
        "threading.Lock": threading.Lock,
        "time.sleep": time.sleep,
        "asyncio.run": asyncio.run,
        "open": builtins.open,
        "print": builtins.print,
    }


def _umask() -> str:
    mask = os.umask(0o022)
    os.umask(mask)
    return f"{mask:03o}"


def _kind_of_loop() -> str:
    loop = asyncio.new_event_loop()
    loop.close()
    return type(loop).__qualname__


def _value_text(value: object) -> str:
    if callable(value):
        return str(getattr(value, "__qualname__", value))
    return repr(value)
