"""Names for the beginnings of prompts, so that servers which have computed one before need not do it again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from shoal.swarm.snapshot import ModelKey

PAGE_TOKENS = 16


def page_chains(model: ModelKey, rows: Sequence[torch.Tensor]) -> list[list[bytes]]:
    """Return for each row of ids one SHA-256 for each full page of 16 tokens.

    Each is over the one before it and the page's ids, the first over the model: two chains are equal as far as model
    and ids are. The last token of a row is never covered, since it has to be computed for its logits.
    """
    start = hashlib.sha256(b"shoal.prefix.v1\0" + str(model).encode() + b"\0" + model.config_digest).digest()
    return [_chain(start, ids) for ids in rows]


def _chain(start: bytes, ids: torch.Tensor) -> list[bytes]:
    chain, last = [], start
    for page in range((len(ids) - 1) // PAGE_TOKENS):
        piece = ids[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].to(torch.int64).numpy().tobytes()
        last = hashlib.sha256(last + piece).digest()
        chain.append(last)
    return chain
