"""`import deep_gemm` where megamoe stands in for it; this folder is on sys.path after install()."""

from megamoe.compat.deep_gemm import install

install()
