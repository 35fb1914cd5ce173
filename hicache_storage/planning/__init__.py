"""Planning: from a trace of requests to the sizes of L2 and L3 that pay.

This is the library behind `hicache plan`. It moves no page. It computes LRU stack distances of the
trace's blocks: the hits of every capacity follow from them.
"""
