"""The simulator: what a plan's launches cost, as a timeline. Standard library only."""
