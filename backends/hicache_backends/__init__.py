"""The backends that come with hicache-storage: one file or folder each, opened by name."""
