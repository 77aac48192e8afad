"""E2M1 code by code, for tests: the library reads both halves of a byte by one look-up."""

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_e2m1(packed):
    """uint8 [..., k / 2] -> codes [..., k]: the inverse of `elements.pack_e2m1`."""
    assert packed.dtype == torch.uint8
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e2m1_to_float(code):
    """The value of each code (uint8 0..15)."""
    values = torch.tensor([sign * value for sign in (1.0, -1.0) for value in VALUES])
    return values.to(code.device)[code.int()]
