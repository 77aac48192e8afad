"""Tests of the number formats: bit by bit against the exact rational oracle in `oracle.py`."""
