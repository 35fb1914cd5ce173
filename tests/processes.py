"""What the kernel says of other processes."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process is there, and not only its number, which its parent has yet to read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
