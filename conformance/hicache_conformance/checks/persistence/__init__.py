"""KV-401 to KV-404: kills, interrupted writes and damaged pages."""
