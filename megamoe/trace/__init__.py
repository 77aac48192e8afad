"""Trace: a Timeline as Perfetto JSON, as text, as a page and as a plot. Standard library only."""
