"""The data plane in Python. It has the compiled module's functions, with the same verdicts."""

from hicache_storage.native.reference.directories import (
    list_directories,
    modes_of,
    stat_files,
)
from hicache_storage.native.reference.files import (
    check_files,
    claim_files,
    exists_files,
    read_files,
    write_files,
)
from hicache_storage.native.reference.frames import (
    check_frames,
    page_files,
    page_trailers,
    write_frames,
)
from hicache_storage.native.reference.locked_files import change_totals
from hicache_storage.native.reference.pieces import (
    HIT,
    KEPT,
    LATE,
    MISS,
    NO_BULK,
    REVOKED,
    UNSYNCED,
    WRONG,
    copy_pages,
)
from hicache_storage.native.reference.revocables import (
    begin_access,
    copy_revocable,
    digests,
    end_access,
    revoke_access,
)
from hicache_storage.native.reference.slots import check_slots, read_slots, write_slots

__all__ = [
    "HIT",
    "KEPT",
    "LATE",
    "MISS",
    "NO_BULK",
    "REVOKED",
    "UNSYNCED",
    "WRONG",
    "begin_access",
    "change_totals",
    "check_files",
    "check_frames",
    "check_slots",
    "claim_files",
    "copy_pages",
    "copy_revocable",
    "digests",
    "end_access",
    "exists_files",
    "list_directories",
    "modes_of",
    "page_files",
    "page_trailers",
    "read_files",
    "read_slots",
    "revoke_access",
    "stat_files",
    "write_files",
    "write_frames",
    "write_slots",
]
