"""Trace: stamps of a launch as a Timeline; a Timeline as Perfetto JSON, text, page and plot.

Standard library only.
"""
