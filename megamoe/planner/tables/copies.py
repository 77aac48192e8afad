"""Tables of the launches around a call: copies of its inputs and outputs, rows that come quantised.

None of them was swept: a copy of 1024 columns is 2 KB of a row, 16 bytes a thread of four warps.
"""

from __future__ import annotations

# name -> (columns of a program, warps, why)
COPIES = {
    "put": (1024, 4, "tokens of a call into the memory that peers read; a row has few programs"),
    "copy_inputs": (1024, 4, "inputs of a replay into the graph's buffers, at whatever address"),
    "copy_output": (1024, 4, "the graph's output to where the call wants it"),
}
READ_WARPS = 1  # one slot of eight words
WHY_READ = "the arguments of a replay, from host memory"

DECODE_VALUES, DECODE_WARPS = 4096, 4  # of a program: 32 values a thread
WHY_DECODE = "tokens that come quantised, as BF16 in the GEMM's order of K"

PREPARE_CHUNK, PREPARE_WARPS = 256, 4  # rows or tiles of a group at a time
WHY_PREPARE = "a program a group makes its tile maps, the others decode rows where there is need"
