"""What a backend must pass, and what its users are tested with: so far, a storage that misbehaves."""

from __future__ import annotations

from hicache_conformance.faults import Fault, FaultyStorage, Strike

__all__ = ["Fault", "FaultyStorage", "Strike"]
