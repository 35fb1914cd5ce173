"""Child processes, threads, and their resources."""
