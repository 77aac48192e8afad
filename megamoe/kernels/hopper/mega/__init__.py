"""The whole layer in one launch."""
