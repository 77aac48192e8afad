"""Studies: models of systems that this library does not run. No call imports them."""
