"""KV-501 to KV-504: threads, processes and calls at the same time."""
