"""Situations of a store that the checks of several rules share."""
