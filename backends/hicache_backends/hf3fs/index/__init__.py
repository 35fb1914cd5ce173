"""The index of slots: in an embedded SQLite file, or in a Redis server."""
