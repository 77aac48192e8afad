"""Compile a kernel to a cubin without a GPU, from the arguments a launch would get."""

import contextlib
import re
import subprocess
import tempfile
from pathlib import Path
from struct import unpack_from

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.engine.recording import on_machine_of
from megamoe.kernels.gluon import compiler_hooks

FUNCTION = 2  # type of a symbol
SIZED, REGISTERS, FRAME, STACK = 4, 0x2F, 0x11, 0x12  # attributes in a cubin's .nv.info
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


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


def compile_kernel(fn, args, arch, **options):
    """The compiled kernel, Triton's or Gluon's: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata`."""
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(fn.signature, fn.params, backend)
    keywords = {**options, "debug": False}
    bound, specialization, _ = binder(*args, **keywords)
    packed, signature, constants, attrs = fn._pack_args(
        backend, keywords, bound, specialization, {}
    )
    kind = GluonASTSource if fn.is_gluon() else ASTSource
    source = kind(fn, signature, constants, attrs)
    is_ours = getattr(fn, "is_ours", False)
    hooks = compiler_hooks.applied() if is_ours else contextlib.nullcontext()
    with on_machine_of(target), hooks:
        return triton.compile(source, target=target, options=packed.__dict__)


def _dump(kernel, what):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run(
            [TOOLS / "cuobjdump", what, file.name], capture_output=True, text=True, check=True
        ).stdout


def sass(kernel):
    """The machine code in words."""
    return _dump(kernel, "--dump-sass")


def resources(kernel):
    """Registers, stack (spills) and shared memory of a compiled kernel, in bytes where bytes.

    Read from the cubin itself: the wheel's `cuobjdump` cannot read those of sm_103a.
    """
    cubin = kernel.asm["cubin"]
    at, size = _sections(cubin)[".nv.info"]
    end, found = at + size, {REGISTERS: 0, FRAME: 0, STACK: 0}
    while at < end:
        form, what, length = unpack_from("<2BH", cubin, at)
        if form == SIZED:
            if what in found:  # of a function: its symbol, the figure
                found[what] = max(found[what], unpack_from("<2I", cubin, at + 4)[1])
            at += length
        at += 4
    stack = max(found[FRAME], found[STACK])
    return {"registers": found[REGISTERS], "stack": stack, "shared": kernel.metadata.shared}


def _sections(cubin):
    """By name: offset and size."""
    (at,), (size, num, names) = unpack_from("<Q", cubin, 40), unpack_from("<3H", cubin, 58)
    headers = [unpack_from("<2I4Q", cubin, at + size * i) for i in range(num)]
    starts = [headers[names][4] + header[0] for header in headers]
    found = [cubin[start : cubin.index(0, start)].decode() for start in starts]
    return {name: header[4:] for name, header in zip(found, headers, strict=True)}


def code_of(kernel):
    """The kernel's instructions: its text, of which a cubin has one section."""
    cubin = kernel.asm["cubin"]
    texts = [at for name, at in _sections(cubin).items() if name.startswith(".text.")]
    ((offset, size),) = texts
    return cubin[offset : offset + size]


def code_bytes(kernel):
    """What the kernel's instructions take."""
    return len(code_of(kernel))


def addresses(kernel):
    """(type of symbol, what is added) of the addresses that the kernel's code loads."""
    cubin = kernel.asm["cubin"]
    found = _sections(cubin)
    offset, size = found.get(".rela.nv.constant4", (0, 0))
    for entry in range(offset, offset + size, 24):
        symbol, added = unpack_from("<Iq", cubin, entry + 12)
        yield cubin[found[".symtab"][0] + 24 * symbol + 4] & 15, added


def advice(kernel, arch="sm_90a"):
    """What the assembler says of the MMAs: it tells where it waits for each before the next."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        assembler = get_ptxas(int(re.sub(r"\D", "", arch))).path  # the one that Triton takes
        command = [assembler, "-v", f"--gpu-name={arch}", source, "-o", source.with_suffix("")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return re.findall(r"wgmma.mma_async instructions are serialized.*", done.stderr + done.stdout)


def main_loop(kernel):
    """The machine instructions of the largest loop that multiplies."""
    found = re.findall(
        r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", _dump(kernel, "--dump-sass"), re.MULTILINE
    )
    lines = [(int(at, 16), re.sub(r"^@!?U?P\w+ ", "", text)) for at, text in found]
    best = []
    for end, text in lines:
        target = re.search(r"^BRA.* (0x[0-9a-f]+)", text)
        if target and int(target[1], 16) < end:
            body = [line for at, line in lines if int(target[1], 16) <= at <= end]
            is_loop = any("GMMA" in line for line in body) and not any("EXIT" in b for b in body)
            best = max(best, body if is_loop else [], key=len)
    return best
