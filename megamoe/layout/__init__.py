"""Layout: where every byte lies. Standard library only; the answer is the same on every rank."""
