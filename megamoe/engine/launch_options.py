"""LaunchOptions: how a layer waits and checks. No bit of a result depends on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megamoe.errors import RangeError, require

MAX_S = 60.0  # a fused launch takes milliseconds: a wait this long is in vain
SLOWER = 20.0  # under compute-sanitizer


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a layer launches its calls."""

    timeout_s: float = MAX_S  # of every wait in a fused launch
    is_poisoned: bool = False  # NaN bytes in all memory of a fused launch before it begins

    def check(self) -> None:
        """Refuse what no call could follow."""
        require(
            self.timeout_s > 0, "timeout_s must be positive", got=self.timeout_s, kind=RangeError
        )


AUTO = LaunchOptions()


def is_watched(environment: Mapping[str, str]) -> bool:
    """Whether compute-sanitizer, which names itself there, started this process."""
    return any(name.startswith("NV_SANITIZER_INJECTION") for name in environment)


_SLOWER = SLOWER if is_watched(os.environ) else 1.0


def bound_s(timeout_s: float) -> float:
    """How long a wait of a fused launch may take: less than a wait between processes."""
    return min(timeout_s, MAX_S) * _SLOWER
