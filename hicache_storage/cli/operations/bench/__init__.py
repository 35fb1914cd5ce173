"""Put a load on a store: its pages, its calls, its figures, and the comparison of two runs."""
