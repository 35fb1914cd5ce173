"""Interleavings of threads, chosen by a seed: the scheduler, scenarios, and known defects."""
