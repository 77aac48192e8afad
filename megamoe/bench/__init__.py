"""Named models, the main job of `megamoe run`, and measurements."""
