"""Balance: which experts stand on which rank, out of recorded statistics. Standard library only."""
