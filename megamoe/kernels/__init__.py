"""Code that runs on the GPU, and its launchers. Kernels act; they choose nothing."""
