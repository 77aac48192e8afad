"""The whole layer in one launch on sm_100a: emulated and compiled, not yet run on the hardware."""
