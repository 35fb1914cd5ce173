"""KV-901 to KV-903: capabilities and limits."""
