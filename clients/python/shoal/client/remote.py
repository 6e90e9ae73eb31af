"""Stands in for the blocks and the cache of a transformers model: the real ones are on servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from shoal.client.connection import SwarmConnection
from shoal.client.fed import FedIds
from shoal.client.rows import RowPlan, check_positions, first_of_equals, plan_rows
from shoal.client.session import InferenceSession
from shoal.swarm.spans import Span
from shoal.wire.errors import BadTensor, InvalidRequest, Unsupported


class _RemoteLayer(CacheLayerMixin):  # type: ignore[misc]
    """Answers transformers' questions about the length of the cache; holds no keys or values."""

    is_croppable = True
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


class RemoteCache(Cache):  # type: ignore[misc]
    """The cache of one batch: a session on the servers, opened by the first forward pass that uses it.

    A `session` that is given stays the caller's: closing the cache leaves it open.
    """

    def __init__(
        self, connection: SwarmConnection, max_tokens: int | None = None, session: InferenceSession | None = None
    ) -> None:
        super().__init__(layers=[_RemoteLayer()])
        self._connection = connection
        self._max_tokens = max_tokens
        self._plan: RowPlan | None = None
        self._ids: torch.Tensor | None = None
        self._needed = 0
        self._borrowed = session is not None
        self._fed = FedIds() if session is None else session.fed
        self.layers[0].columns = self._fed.columns
        self.session = session

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

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make rows go on from other rows; the servers share what the rows have in common."""
        if self.session is not None:
            sources = beam_idx.tolist()
            self.session.reorder(sources)
            self._fed.reorder(sources)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns; `tokens_to_remove` is zero or negative, as transformers gives it.

        Raises:
            InvalidRequest: if it is positive or more than there are.
        """
        if not 0 <= -tokens_to_remove <= self.columns:
            raise InvalidRequest(f"{-tokens_to_remove} of {self.columns} columns cannot be forgotten")
        if tokens_to_remove and self.session is not None:
            self.session.cut(self._fed.drop(-tokens_to_remove))
            self.layers[0].columns = self._fed.columns

    @contextmanager
    def step(
        self,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        ids: torch.Tensor | None,
        shape: tuple[int, int],
        needed: int = 0,
    ) -> Iterator[None]:
        """Plan the step of `shape` (rows, columns) that the forward pass inside will make.

        `needed` is how many of the last columns are looked at; 0 means all.

        Raises:
            InvalidRequest, Unsupported: if mask or positions cannot be honoured.
        """
        rows, columns = shape
        if mask is not None and mask.dim() == 2 and mask.shape[1] != self.columns + columns:
            raise InvalidRequest(
                f"attention_mask has {mask.shape[1]} columns, expected {self.columns + columns}: "
                "one for each token of the session, old and new"
            )
        held = self.held(rows)
        self._plan = plan = plan_rows(mask, rows, columns, held)
        self._ids, self._needed = ids, needed
        check_positions(position_ids, plan, held)
        try:
            yield
            self._remember(ids, plan, columns)
        finally:
            self._plan = None

    def _remember(self, ids: torch.Tensor | None, plan: RowPlan, columns: int) -> None:
        cells = torch.ones(len(plan.lengths), columns, dtype=torch.bool) if plan.cells is None else plan.cells
        self._fed.append(ids, cells)
        self.layers[0].columns = self._fed.columns

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """Send hidden states `[rows, columns, hidden]` of the planned step through the remote blocks."""
        plan = self._plan
        if plan is None:
            raise InvalidRequest("call the model itself: the blocks alone do not know which tokens are padding")
        if sum(plan.lengths) == 0:
            return torch.zeros_like(hidden)
        if self.session is None:
            self.session = self._connection.open_session(
                rows=len(plan.lengths),
                max_tokens=self._max_tokens,
                prompt_tokens=max(plan.lengths),
                prompt=plan.real(self._ids) if self._ids is not None and self._needed else (),
            )
        firsts = first_of_equals(hidden, plan) if len(plan.lengths) > 1 and not any(self.session.positions) else ()
        if len(set(firsts)) == len(firsts):
            needed = plan.needed(self._needed)
            return plan.unpack(self.session.step_packed(plan.pack(hidden), plan.lengths, needed))
        return self._run_firsts(hidden, plan, firsts)

    def _run_firsts(self, hidden: torch.Tensor, plan: RowPlan, firsts: tuple[int, ...]) -> torch.Tensor:
        """Send only the first of equal rows; the others go on from its cache."""
        assert self.session is not None
        lengths = tuple(length if firsts[row] == row else 0 for row, length in enumerate(plan.lengths))
        sent = torch.cat([real for row, real in enumerate(plan.real(hidden)) if firsts[row] == row])
        packed = self.session.step_packed(sent, lengths, plan.needed(self._needed))
        outputs = dict(zip(dict.fromkeys(firsts), _split(packed, lengths), strict=True))
        self.session.reorder(firsts)
        return plan.unpack(torch.cat([outputs[first] for first in firsts]))

    def close(self) -> None:
        """Free the session on the servers, unless it is the caller's."""
        if self.session is not None and not self._borrowed:
            self.session.close()


def _split(packed: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    return torch.split(packed, [length for length in lengths if length])


class RemoteSequential(torch.nn.Module):
    """Blocks of the model as one module: takes and gives hidden states `[rows, columns, hidden]`.

    `remote[3:6]` and `remote[4]` are parts of it. They share connection, configuration and all that is learned.
    """

    def __init__(self, connection: SwarmConnection, span: Span | None = None, *, gives_tuple: bool = False) -> None:
        super().__init__()
        self.connection = connection
        self.span = span or connection.model.blocks
        self._gives_tuple = gives_tuple

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, index: int | slice) -> RemoteSequential:
        """Return a part: one block, or a range of blocks without a step.

        Raises:
            IndexError: if it is empty or not inside.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
        else:
            start, step = (index + len(self) if index < 0 else index), 1
            stop = start + 1
        if step != 1 or not 0 <= start < stop <= len(self):
            raise IndexError(f"blocks {index} are not a range of the {len(self)} blocks {self.span}")
        return RemoteSequential(self.connection, Span(self.span.start + start, self.span.start + stop))

    def inference_session(self, *, max_tokens: int | None = None, batch_size: int = 1) -> InferenceSession:
        """Open a session over these blocks for steps of hidden states `[batch_size, tokens, hidden]`.

        Raises:
            TooLong, NoRoute, CacheFull, ...: as `SwarmConnection.open_session`.
        """
        return self.connection.open_session(rows=batch_size, max_tokens=max_tokens, span=self.span)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        cache: Cache | None = None,
        layer_past: Cache | None = None,
        **__: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Run the planned step of a model's cache, or, without a cache, all tokens in a session of their own.

        Raises:
            Unsupported: for a cache of another kind, or if gradients are wanted.
            BadTensor: if the shape is not `[rows, columns, hidden]`.
        """
        remote = cache if cache is not None else layer_past
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise Unsupported("gradients through remote blocks are not supported; use torch.no_grad()")
        if remote is None:
            return self._alone(hidden_states)
        if not isinstance(remote, RemoteCache):
            raise Unsupported(f"a {type(remote).__name__} cannot hold a remote session; leave the cache out")
        output = remote.run(hidden_states)
        return (output, None) if self._gives_tuple else output

    def _alone(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dim() != 3:
            raise BadTensor(f"expected [rows, tokens, hidden], got {list(hidden_states.shape)}")
        rows, tokens, _ = hidden_states.shape
        with self.inference_session(max_tokens=tokens, batch_size=rows) as session:
            return session.step(hidden_states)
