"""Situations that stores are put in, shared by the checks of several rules."""
