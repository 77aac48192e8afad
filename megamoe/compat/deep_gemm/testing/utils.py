"""What the machine is."""

from __future__ import annotations

import torch


def get_arch_major() -> int:
    """9 on Hopper, 10 on Blackwell; 0 without a GPU."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
