"""Balance: which experts lie on which rank, out of recorded statistics. Standard library only."""
