"""Tests of the layout: regions, capacity, the workspace, and stored orders."""
