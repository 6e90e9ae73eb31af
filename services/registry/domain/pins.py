"""Which weights a model has: the first server that shows a block decides, later ones must agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from shoal.swarm.snapshot import ModelKey, Server
from shoal.wire.errors import BlockHashMismatch, PreconditionFailed


@dataclass(frozen=True, slots=True)
class Pins:
    """What is fixed about a model: its number of blocks, and the hashes of the blocks seen so far."""

    num_blocks: int
    hashes: Mapping[int, bytes] = field(default_factory=lambda: MappingProxyType({}))

    def merged(self, hashes: Mapping[int, bytes]) -> Pins:
        """Return the pins with more blocks; those known stay."""
        return Pins(self.num_blocks, MappingProxyType({**hashes, **self.hashes}))


def claimed_pins(server: Server) -> Pins:
    """Return what a server's record says about its model."""
    return Pins(server.num_blocks, MappingProxyType(dict(zip(server.span.blocks(), server.block_hashes, strict=True))))


def check_agreement(model: ModelKey, pinned: Pins, claimed: Pins) -> None:
    """Compare what a server claims with what is pinned.

    Raises:
        PreconditionFailed: if the number of blocks differs.
        BlockHashMismatch: if a block's weights differ; it names the first such block, both hashes and what to do.
    """
    if pinned.num_blocks != claimed.num_blocks:
        raise PreconditionFailed(
            f"{model} has {pinned.num_blocks} blocks in this swarm, the server says {claimed.num_blocks}; "
            "serve the same checkpoint as the others or give the model another name"
        )
    for block in sorted(claimed.hashes):
        expected, got = pinned.hashes.get(block), claimed.hashes[block]
        if expected is not None and expected != got:
            raise BlockHashMismatch(
                f"block {block} of {model}: this swarm has weights {expected.hex()}, the server has {got.hex()}; "
                "download the model's original files anew, or serve these weights under another name",
                block=str(block),
                expected=expected.hex(),
                got=got.hex(),
            )


def unknown_blocks(pinned: Pins | None, claimed: Pins) -> dict[int, bytes]:
    """Return the claimed blocks that are not pinned yet."""
    known = pinned.hashes if pinned else {}
    return {block: block_hash for block, block_hash in claimed.hashes.items() if block not in known}
