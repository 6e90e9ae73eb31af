"""Stands in for the blocks and the cache of a transformers model: the real ones are on servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from shoal.client.connection import SwarmConnection
from shoal.client.rows import RowPlan, check_positions, plan_rows
from shoal.client.session import InferenceSession
from shoal.wire.errors import InvalidRequest, Unsupported


class _RemoteLayer(CacheLayerMixin):  # type: ignore[misc]
    """Answers transformers' questions about the length of the cache; holds no keys or values."""

    is_sliding = False
    is_linear = False
    is_dummy = False

    def __init__(self) -> None:
        super().__init__()
        self.columns = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError("keys and values are on the servers")

    def update(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("keys and values are on the servers")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise Unsupported("beams need cache reordering on the servers, which is not supported")


class RemoteCache(Cache):  # type: ignore[misc]
    """The cache of one batch: a session on the servers, opened by the first forward pass that uses it.

    Close it to free the servers' memory; the end of its life does so too.
    """

    def __init__(self, connection: SwarmConnection, max_tokens: int | None = None) -> None:
        super().__init__(layers=[_RemoteLayer()])
        self._connection = connection
        self._max_tokens = max_tokens
        self._plan: RowPlan | None = None
        self.session: InferenceSession | None = None

    @property
    def columns(self) -> int:
        """Columns of the batch so far, padding included."""
        return int(self.layers[0].columns)

    def held(self, rows: int) -> tuple[int, ...]:
        """Return how many tokens each row holds on the servers.

        Raises:
            InvalidRequest: if the batch is not the cache's.
        """
        if self.session is None:
            return (0,) * rows
        if self.session.rows != rows:
            raise InvalidRequest(f"the cache holds {self.session.rows} rows, the input has {rows}")
        return self.session.positions

    @contextmanager
    def step(
        self, mask: torch.Tensor | None, position_ids: torch.Tensor | None, rows: int, columns: int
    ) -> Iterator[None]:
        """Plan the step that the forward pass inside will make; afterwards the cache is `columns` longer.

        Raises:
            InvalidRequest, Unsupported: if mask or positions cannot be honoured.
        """
        if mask is not None and mask.dim() == 2 and mask.shape[1] != self.columns + columns:
            raise InvalidRequest(
                f"attention_mask has {mask.shape[1]} columns, expected {self.columns + columns}: "
                "one for each token of the session, old and new"
            )
        held = self.held(rows)
        self._plan = plan_rows(mask, rows, columns, held)
        check_positions(position_ids, self._plan, held)
        try:
            yield
            self.layers[0].columns += columns
        finally:
            self._plan = None

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """Send hidden states `[rows, columns, hidden]` of the planned step through the remote blocks."""
        plan = self._plan
        if plan is None:
            raise InvalidRequest("call the model itself: the blocks alone do not know which tokens are padding")
        if sum(plan.lengths) == 0:
            return torch.zeros_like(hidden)
        if self.session is None:
            longest = max(plan.lengths)
            self.session = self._connection.open_session(
                rows=len(plan.lengths), max_tokens=self._max_tokens, prompt_tokens=longest
            )
        return plan.unpack(self.session.step_packed(plan.pack(hidden), plan.lengths))

    def close(self) -> None:
        """Free the session on the servers."""
        if self.session is not None:
            self.session.close()


class RemoteSequential(torch.nn.Module):
    """All blocks of the model as one module: takes and gives hidden states `[rows, columns, hidden]`."""

    def __init__(self, connection: SwarmConnection, *, gives_tuple: bool) -> None:
        super().__init__()
        self.connection = connection
        self._gives_tuple = gives_tuple

    def __len__(self) -> int:
        return self.connection.model.family.num_blocks

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        cache: Cache | None = None,
        layer_past: Cache | None = None,
        **__: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Run the planned step; transformers names the cache differently from family to family."""
        remote = cache if cache is not None else layer_past
        if not isinstance(remote, RemoteCache):
            raise Unsupported(f"a {type(remote).__name__} cannot hold a remote session; leave the cache out")
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise Unsupported("gradients through remote blocks are not supported; use torch.no_grad()")
        output = remote.run(hidden_states)
        return (output, None) if self._gives_tuple else output
