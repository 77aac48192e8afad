"""One rank: weights, the functional call, the module, and the choice of backend."""
