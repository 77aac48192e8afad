"""Triton's interpreter for tests: sums whose order no BLAS picks, and less done over again.

It looks through `triton.language` anew at every call of a device function (a quarter of its time)
and checks integers for overflow (a fifth): no size of a test is near one.
"""

import functools
import inspect

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Change the interpreter of this process, once."""
    interpreter._patch_lang = functools.partial(_patch_once, interpreter._patch_lang)
    interpreter.InterpreterBuilder.create_dot = functools.partialmethod(
        _dot, interpreter.InterpreterBuilder.create_dot
    )
    builder = interpreter.interpreter_builder
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _patch_once(patch, fn):
    """A device function finds what its kernel has patched."""
    langs = [t for t in fn.__globals__.values() if inspect.ismodule(t) and t in (tl, tl.core)]
    if langs and not any(tl.core.is_builtin(lang.load) for lang in langs):
        return interpreter._LangPatchScope()
    return patch(fn)


def _dot(builder, otherwise, a, b, d, *how):
    """In float64, then rounded: numpy's float32 sums depend on the shape, and on the CPU."""
    if not d.dtype.scalar.is_floating():
        return otherwise(builder, a, b, d, *how)
    values = []
    for t in (a, b):
        data = t.data
        if t.dtype.primitive_bitwidth == 8:
            data = interpreter._convert_float(data, t.dtype, tl.float16, None).view(np.float16)
        values.append(data.astype(np.float64))
    with np.errstate(all="ignore"):
        product = np.matmul(*values).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
