"""Log an engine's requests: why each one hit or missed, and as a trace for capacity planning.

    reasons      the reasons for a missing page
    records      a line of the explain log
    settings     the fields in the settings of the engines' adapters
    line_writer  the thread that writes lines, and drops them rather than wait
    log_file     the file, its limit, and its rotation
    explain_log  makes records from the results of a page store
    trace        a trace in the Mooncake format
    reading      selects and counts the records of a file

The logs hold page hashes and request ids, but never tokens, keys of a store or settings.
"""

from __future__ import annotations

from hicache_storage.request_log.explain_log import ExplainLog, open_explain_log
from hicache_storage.request_log.reasons import Reason
from hicache_storage.request_log.records import Operation, RequestRecord
from hicache_storage.request_log.settings import ExplainLogSettings, TraceSettings
from hicache_storage.request_log.trace import TraceRecorder, open_trace

__all__ = [
    "ExplainLog",
    "ExplainLogSettings",
    "Operation",
    "Reason",
    "RequestRecord",
    "TraceRecorder",
    "TraceSettings",
    "open_explain_log",
    "open_trace",
]
