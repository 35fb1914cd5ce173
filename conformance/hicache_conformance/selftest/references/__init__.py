"""Right stores of different kinds. The kit must accept them, and wrong stores derive from them.

Each is imported from its own module. They have small methods, so that a wrong store is a right one with
a single method replaced. `plain.PlainStore` lists the methods.
"""
