"""Settings of DeepGEMM that callers make: remembered, and where we have the like, heeded."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.errors import RangeError, require

_set: dict[str, Any] = {"num_sms": None, "tc_util": 100, "pdl": False, "ignore": False}


def get_num_sms() -> int:
    """The SMs that launches may use; 0 without a GPU, unless one was set."""
    if _set["num_sms"] is not None:
        return int(_set["num_sms"])
    return _all_sms(torch.device("cuda")) if torch.cuda.is_available() else 0


def set_num_sms(new_num_sms: int) -> None:
    """Fused launches leave the other SMs alone; staged ones do not ask."""
    require(new_num_sms >= 0, "num_sms must not be negative", got=new_num_sms, kind=RangeError)
    _set["num_sms"] = new_num_sms or None


def reserved_sms(device: torch.device) -> int:
    """The SMs of a GPU that `set_num_sms` keeps launches from."""
    if device.type != "cuda" or _set["num_sms"] is None:
        return 0
    return max(0, _all_sms(device) - int(_set["num_sms"]))


def _all_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def get_tc_util() -> int:
    """As set; nothing here reads it."""
    return int(_set["tc_util"])


def set_tc_util(new_tc_util: int) -> None:
    """Remembered."""
    _set["tc_util"] = new_tc_util


def get_pdl() -> bool:
    """As set; launches overlap as `mm.MoE` decides."""
    return bool(_set["pdl"])


def set_pdl(new_value: bool) -> None:
    """Remembered."""
    _set["pdl"] = new_value


def set_ignore_compile_dims(new_value: bool) -> None:
    """Remembered."""
    _set["ignore"] = new_value


def set_block_size_multiple_of(value: int | tuple[int, int]) -> None:
    """Remembered."""
    _set["block"] = value
