"""Compile a kernel to a cubin without a GPU, from the arguments a launch would get."""

import functools
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.kernels.device import compat


class Stand:
    """Stands for a device tensor: a dtype, a shape for descriptors, and an aligned address."""

    def __init__(self, dtype, shape=(1,)):
        self.dtype, self.shape = dtype, shape

    def rows(self, block):
        """A tensor descriptor over it, contiguous."""
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * size)
        return TensorDescriptor(self, list(self.shape), strides, list(block))

    @staticmethod
    def data_ptr():
        return 0

    @staticmethod
    def ptr_range():
        return 0


def _same(target):
    return target


def compile_kernel(fn, args, arch, **options):
    """The compiled kernel: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata`."""
    target = GPUTarget("cuda", arch, 32)
    compat.current_target = functools.partial(_same, target)  # as on a machine with that GPU
    compat.current_target.__triton_builtin__ = True
    backend = make_backend(target)
    binder = create_function_from_signature(fn.signature, fn.params, backend)
    keywords = {**options, "debug": False}
    bound, specialization, _ = binder(*args, **keywords)
    packed, signature, constants, attrs = fn._pack_args(
        backend, keywords, bound, specialization, {}
    )
    source = ASTSource(fn, signature, constants, attrs)
    return triton.compile(source, target=target, options=packed.__dict__)


def resources(kernel):
    """Registers, stack (spills) and shared memory of a compiled kernel, in bytes where bytes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": kernel.metadata.shared}
