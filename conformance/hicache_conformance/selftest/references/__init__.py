"""Right stores of very different kinds: what the kit must accept, and what wrong stores derive from.

Import each from its own module. They are cut into small methods so that a wrong store is a right one
with a single method replaced; `plain.PlainStore` says which method is for what.
"""
