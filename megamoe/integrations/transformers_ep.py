"""transformers' expert parallelism over our group: ep_implementation="megamoe".

transformers shards the experts and hands each rank its batch; rows travel as in `mm.MoE` over a
group, and each token is computed once. Inference only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.errors import NotAvailable, require
from megamoe.integrations import transformers as ours


def implementation(
    base: type, recipe: str | None, backend: str, max_tokens_per_rank: int | None
) -> type:
    """A class for transformers' `EPImplementationInterface`, made of its `EPImplementation`."""

    class MegaMoEGroup(base):  # type: ignore[misc]
        """The experts of one module on the ranks of `ep_mesh`; ranks of `tp_mesh` share a batch."""

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts
            self.kept: ours.Kept | None = None

        def __call__(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            kept = self._kept(top_k_index.shape[-1])
            num_sharers = self.tp_mesh.size()
            if num_sharers == 1:
                return ours.call(kept.layer, hidden_states, top_k_index, top_k_weights)
            # Ranks that share a batch take equal parts of it; the last ones may lack rows.
            num_tokens, hidden = hidden_states.shape
            rows = -(-num_tokens // num_sharers)
            first = self.tp_mesh.get_local_rank() * rows
            part = slice(first, first + rows)
            y = ours.call(kept.layer, hidden_states[part], top_k_index[part], top_k_weights[part])
            mine = torch.zeros(rows, hidden, dtype=y.dtype, device=y.device)
            mine[: len(y)] = y
            every = torch.empty(num_sharers * rows, hidden, dtype=y.dtype, device=y.device)
            dist.all_gather_into_tensor(every, mine, group=self.tp_mesh.get_group())
            return every[:num_tokens]

        def _kept(self, top_k: int) -> ours.Kept:
            """The layer over the group: made at the first call, which all ranks make."""
            if self.kept is None:
                layer = ours.make_layer(
                    self.experts, top_k, recipe, backend, group=self.ep_mesh.get_group(),
                    num_ranks=self.ep_mesh.size(), max_tokens_per_rank=max_tokens_per_rank,
                )  # fmt: skip
                self.kept = ours.keep(self.experts, top_k, layer)
            require(
                self.kept.is_current(self.experts, top_k),
                "the experts of a group must stay as they were at the first call",
                got="other parameters on this rank",
                fix="make the model anew: a layer over a group is made on all ranks at once",
                kind=NotAvailable,
            )
            return self.kept

    return MegaMoEGroup
