"""One `generate` call: its caches, and in a session what it goes on from."""

from __future__ import annotations

from typing import Any

import torch

from shoal.client.connection import SwarmConnection
from shoal.client.remote import RemoteCache
from shoal.client.session import InferenceSession
from shoal.wire.errors import InvalidRequest


class Turn:
    """A running `generate` call, in a session of the caller or in one of its own that ends with it."""

    def __init__(self, connection: SwarmConnection, session: InferenceSession | None) -> None:
        self._connection = connection
        self._caches: list[RemoteCache] = []
        self._known_columns = 0
        self.session = session

    def begin(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the ids to give to transformers.

        Without any, a session's own ids are taken, and their mask is put into `kwargs`.

        Raises:
            InvalidRequest: if there are none and the session has none.
        """
        given = inputs is not None or any(kwargs.get(name) is not None for name in ("input_ids", "inputs_embeds"))
        if self.session is None or given:
            return inputs
        fed = self.session.fed
        if fed.output is None:
            raise InvalidRequest("the session has no ids yet: give some to the first generate()")
        self._known_columns = fed.output.shape[1]
        if fed.mask is not None:
            ones = fed.mask.new_ones(fed.mask.shape[0], self._known_columns - fed.mask.shape[1])
            kwargs["attention_mask"] = torch.cat([fed.mask, ones], dim=1)
        return fed.output

    def reuse(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Roll the session back to what it shares with `ids`."""
        if self.session is not None:
            self.session.fed.mask = mask
            if ids.shape[0] == self.session.rows:
                self.session.roll_back(self.session.fed.keep_common(ids, mask, self.session.positions))

    def cache(self, max_tokens: int) -> RemoteCache:
        """Return a cache for a generation of at most `max_tokens` tokens."""
        cache = RemoteCache(self._connection, max_tokens, self.session)
        self._caches.append(cache)
        return cache

    def end(self, output: Any) -> Any:
        """Remember the call's ids for the next turn; leave out those that were not given to it."""
        if self.session is None:
            return output
        plain = isinstance(output, torch.Tensor)
        ids = output if plain else output.sequences
        self.session.fed.output = ids
        if not self._known_columns:
            return output
        if plain:
            return ids[:, self._known_columns :]
        output.sequences = ids[:, self._known_columns :]
        return output

    def close(self) -> None:
        """Free what belongs to the call."""
        for cache in self._caches:
            cache.close()
