"""What the Gluon kernels of all architectures share."""
