"""Schedule: who computes which block when, and how a plan is chosen. Standard library only."""
