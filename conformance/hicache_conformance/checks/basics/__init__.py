"""KV-001 to KV-009: pages that were set are there, others are not."""
