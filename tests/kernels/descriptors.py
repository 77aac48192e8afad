"""Instruction descriptors of a compiled kernel's MMAs, read off its PTX, and what PTX forbids.

Gluon 3.6 compiles MMAs that the hardware does not have; no stage before a GPU objects.
"""

import re

# kind -> {field: (first bit, bits)}; PTX ISA, tables of the instruction descriptor
_BOTH = {
    "transpose_a": (15, 1),
    "transpose_b": (16, 1),
    "a_type": (7, 3),
    "b_type": (10, 3),
    "n": (17, 6),
}
_SCALED = {**_BOTH, "m": (24, 5), "b_scale_id": (4, 2), "is_ue8m0": (23, 1), "a_scale_id": (29, 2)}
_PLAIN = {**_BOTH, "m": (24, 5), "d_type": (4, 2), "is_sparse": (2, 1)}
FIELDS = {"mxf8f6f4": _SCALED, "mxf4": _SCALED, "mxf4nvf4": _SCALED,
          "f8f6f4": _PLAIN, "f16": _PLAIN}  # fmt: skip
_NARROW = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
TYPES = {
    "mxf8f6f4": _NARROW, "f8f6f4": _NARROW, "mxf4": {1: "e2m1"}, "mxf4nvf4": {1: "e2m1"},
    "f16": {0: "f16", 1: "bf16"},
}  # fmt: skip
MMA = re.compile(
    r"tcgen05\.mma\.cta_group::(\d)\.kind::(\w+)\S*\s+\[\s*%r\d+\s*\+\s*\d+\s*\],\s*"
    r"(?:%rd\d+|\[[^\]]+\]),\s*%rd\d+,\s*(%r\d+)"
)


def decoded(ptx):
    """One row per MMA: its kind, M, N, types, scale ids."""
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+),\s*(-?\d+);", ptx))
    rows = []
    for group, kind, name in MMA.findall(ptx):
        word = int(constants[name]) & 0xFFFFFFFF
        row = {key: word >> first & (1 << size) - 1 for key, (first, size) in FIELDS[kind].items()}
        row |= {"kind": kind, "group": int(group), "n": row["n"] * 8, "m": row["m"] * 16}
        for side in ("a_type", "b_type"):
            row[side] = TYPES[kind].get(row[side], row[side])
        rows.append(row)
    return rows


def faults(row, *, is_deep=False):
    """What PTX (ISA 9.1, table 39) or libraries that ran on the hardware forbid of an MMA.

    is_deep  K = 96, of sm_103a: its scales begin anywhere in a word, and are not looked at
    """
    found = []
    is_scaled, group = row["kind"].startswith("mx"), row["group"]
    legal_m = {128 * group} if is_scaled else {64 * group, 128 * group}
    if row["m"] not in legal_m:
        found.append(f"M={row['m']}")
    step = 8 * group if is_scaled or row["m"] == 64 else 16 * group
    if row["n"] % step or not step <= row["n"] <= 256:
        found.append(f"N={row['n']} is no multiple of {step}")
    if any(isinstance(row[side], int) for side in ("a_type", "b_type")):
        found.append(f"types {row['a_type']} and {row['b_type']}")
    if is_scaled and not is_deep:
        ids = {"mxf8f6f4": range(4), "mxf4": (0, 2), "mxf4nvf4": (0,)}[row["kind"]]
        found += [f"{k}={row[k]}" for k in ("a_scale_id", "b_scale_id") if row[k] not in ids]
    if is_scaled and bool(row["is_ue8m0"]) != (row["kind"] != "mxf4nvf4"):
        found.append("scale type")
    if not is_scaled and row["d_type"] != 1:
        found.append("sums are not FP32")
    return found
