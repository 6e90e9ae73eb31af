"""Checks announced weights against the pinned ones, asking the database only about blocks not seen before."""

from __future__ import annotations

from services.registry.domain.pins import Pins, check_agreement, claimed_pins, unknown_blocks
from services.registry.store_archive import Archive
from shoal.swarm.snapshot import ModelKey, Server

MOST_MODELS = 1000


class PinBoard:
    """The pins known to this process. What it knows needs no database, so renewals go on while that is away."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._known: dict[ModelKey, Pins] = {}

    async def check(self, server: Server) -> None:
        """Pin what the server is the first to show, and compare the rest.

        Raises:
            BlockHashMismatch, PreconditionFailed: if its weights are not those of the swarm.
            Unavailable: if a block was not seen before and the database does not answer.
        """
        claimed = claimed_pins(server)
        known = self._known.get(server.model)
        if known is not None:
            check_agreement(server.model, known, claimed)
        if known is None or unknown_blocks(known, claimed):
            pinned = await self._archive.pin(server.model, claimed)
            self._remember(server.model, pinned)

    def _remember(self, model: ModelKey, pinned: Pins) -> None:
        # Popped and set again: the model asked about longest ago is the first to be forgotten.
        known = self._known.pop(model, Pins(pinned.num_blocks))
        while len(self._known) >= MOST_MODELS:
            self._known.pop(next(iter(self._known)))
        self._known[model] = known.merged(pinned.hashes)
