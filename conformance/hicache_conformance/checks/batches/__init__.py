"""KV-201 to KV-205: verdicts, sizes and buffers of batches."""
