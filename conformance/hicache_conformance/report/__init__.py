"""The report of a run: one record, and the forms in which people and tools read it."""
