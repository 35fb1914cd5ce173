"""The index of slots, kept in an embedded SQLite file or in a Redis server."""
