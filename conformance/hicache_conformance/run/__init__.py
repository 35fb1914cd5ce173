"""One run of the kit, from a subject and options to a tested record."""

from __future__ import annotations

CHECK_PROPERTY = "hicache_check"
"""The property of a pytest report that has a `CheckRecord` as JSON."""
