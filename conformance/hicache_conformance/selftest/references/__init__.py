"""Right stores of different kinds. The kit must accept them, and wrong stores derive from them.

Import each from its own module. Their methods are small, so that a wrong store replaces a single
method of a right one. `plain.PlainStore` lists the methods.
"""
