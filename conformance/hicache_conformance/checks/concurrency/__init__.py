"""KV-501 to KV-504: threads, processes and simultaneous calls."""
