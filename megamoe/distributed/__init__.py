"""Worlds: how the ranks of a layer reach each other."""
