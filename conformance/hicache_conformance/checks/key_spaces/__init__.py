"""KV-101 to KV-106: key spaces, their names, listings and clearing."""
