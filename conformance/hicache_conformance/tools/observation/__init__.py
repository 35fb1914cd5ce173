"""Files, logs and histories that a store leaves."""
