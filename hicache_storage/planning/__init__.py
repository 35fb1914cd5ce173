"""Planning: find the sizes of L2 and L3 that are worth their cost, from a trace of requests.

This is the library behind `hicache plan`. It does not move pages. It computes the LRU stack distances of
the trace's blocks, which give the hits for every capacity.
"""
