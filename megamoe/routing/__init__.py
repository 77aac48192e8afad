"""Routing: scores to experts (`spec.py`, `router.py`), slots sorted by expert, samplers of skew."""
