"""Runs threads in interleavings that a seed chooses: the scheduler, scenarios, and known defects."""
