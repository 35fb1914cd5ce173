"""KV-201 to KV-205: verdicts and buffers of batches."""
