"""The two grouped GEMMs, and what they share."""
