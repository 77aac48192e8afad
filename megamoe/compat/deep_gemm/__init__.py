"""DeepGEMM's MegaMoE calls on our engine: change the import, keep the code.

    import megamoe.compat.deep_gemm as deep_gemm

Same arguments, tensor layouts and results, on any backend, CPU included. For files that must stay
as they are, `install()` makes `import deep_gemm` mean this package, and
`python -m megamoe.compat.deep_gemm FILE ...` runs a script so. docs/deep-gemm.md has the details.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from megamoe.compat.deep_gemm import mega, testing, utils
from megamoe.compat.deep_gemm.machine import (
    get_num_sms,
    get_pdl,
    get_tc_util,
    set_block_size_multiple_of,
    set_ignore_compile_dims,
    set_num_sms,
    set_pdl,
    set_tc_util,
)
from megamoe.compat.deep_gemm.mega import *  # noqa: F403
from megamoe.compat.deep_gemm.mega import __all__ as _mega
from megamoe.compat.deep_gemm.utils import *  # noqa: F403  (upstream has them at both places)
from megamoe.compat.deep_gemm.utils import __all__ as _utils
from megamoe.compat.deep_gemm.utils.layout import transform_sf_into_required_layout

__all__ = [
    *_utils,
    *_mega,
    "get_num_sms",
    "get_pdl",
    "get_tc_util",
    "install",
    "mega",
    "set_block_size_multiple_of",
    "set_ignore_compile_dims",
    "set_num_sms",
    "set_pdl",
    "set_tc_util",
    "testing",
    "transform_sf_into_required_layout",
    "utils",
]

__version__ = "2.6.1"  # DeepGEMM's; the interface is a superset of it and of its fork's 0.2.5


def install() -> None:
    """Make `import deep_gemm` find this package, here and in processes that this one spawns."""
    shim = str(Path(__file__).parent / "shim")
    if shim not in sys.path:
        sys.path.insert(0, shim)
    for name, module in list(sys.modules.items()):
        if name == __name__ or name.startswith(f"{__name__}."):
            sys.modules["deep_gemm" + name.removeprefix(__name__)] = module


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"megamoe stands in for DeepGEMM's MegaMoE alone and has no {name!r}; "
        "install DeepGEMM for its other kernels"
    )
