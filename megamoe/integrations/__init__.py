"""Doors from other frameworks: models that call the layer without knowing it."""
