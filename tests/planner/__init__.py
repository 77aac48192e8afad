"""Tests of the schedule: blocks, waves, dealing, peeling, heuristics and plans."""
