"""The data plane in Python: the functions of the compiled module, with the same verdicts."""

from hicache_storage.native.reference.files import (
    check_files,
    exists_files,
    read_files,
    write_files,
)
from hicache_storage.native.reference.pieces import (
    HIT,
    IOV_MAX,
    KEPT,
    LATE,
    MISS,
    NO_BULK,
    UNSYNCED,
    WRONG,
    digests,
    move_all,
)
from hicache_storage.native.reference.slots import check_slots, read_slots, write_slots
from hicache_storage.native.reference.sockets import receive_bulks, receive_pieces, send_pieces

__all__ = [
    "HIT",
    "IOV_MAX",
    "KEPT",
    "LATE",
    "MISS",
    "NO_BULK",
    "UNSYNCED",
    "WRONG",
    "check_files",
    "check_slots",
    "digests",
    "exists_files",
    "move_all",
    "read_files",
    "read_slots",
    "receive_bulks",
    "receive_pieces",
    "send_pieces",
    "write_files",
    "write_slots",
]
