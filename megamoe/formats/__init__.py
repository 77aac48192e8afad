"""Number formats: data in `spec.py` (standard library only), exact torch maths beside it."""
