"""KV-001 to KV-009: pages that were set are there, and no others."""
