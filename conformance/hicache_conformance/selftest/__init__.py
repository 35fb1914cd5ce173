"""Tests of the kit on stores whose verdict is known."""
