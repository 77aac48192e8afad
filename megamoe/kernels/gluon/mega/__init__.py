"""The fused launch: its parts that are the same on every architecture."""
