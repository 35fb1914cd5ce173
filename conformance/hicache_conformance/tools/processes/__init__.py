"""Child processes, threads, and what they hold."""
