"""Names for the beginnings of prompts, so that servers which have computed one before need not do it again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from shoal.swarm.snapshot import ModelKey

PAGE_TOKENS = 16


def page_chains(model: ModelKey, codec: str, rows: Sequence[torch.Tensor]) -> list[list[bytes]]:
    """Return for each row of ids one SHA-256 for each full page of 16 tokens.

    Each is over the one before it and the page's ids, the first over all else that shapes what servers compute: the
    model, and the codec in which activations reach them. Two chains are equal as far as all of that is. The last token
    of a row is never covered, since it has to be computed for its logits.
    """
    shaped_by = (b"shoal.prefix.v1", str(model).encode(), model.config_digest, codec.encode())
    start = hashlib.sha256(b"\0".join(shaped_by)).digest()
    return [_chain(start, ids) for ids in rows]


def _chain(start: bytes, ids: torch.Tensor) -> list[bytes]:
    chain, last = [], start
    for page in range((len(ids) - 1) // PAGE_TOKENS):
        piece = ids[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].to(torch.int64).numpy().tobytes()
        last = hashlib.sha256(last + piece).digest()
        chain.append(last)
    return chain
