"""What a run leaves behind: one record, and the forms in which people and tools read it."""
