"""Which servers of a route hand their outputs to the next one, and how they are told."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.client.legs import Leg
from shoal.swarm.snapshot import Server
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.errors import ShoalError

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Link:
    """What one hop is told: the secret that the hop before presents (empty if none does), and where outputs go."""

    push_key: bytes
    next_hop: pb.PushTarget | None


def plan_links(servers: Sequence[Server], reachable: Callable[[Server, Server], bool]) -> list[Link]:
    """Return one link for each hop of a route; servers that cannot reach the next one push nothing."""
    keys = [b""] + [
        secrets.token_bytes(_KEY_BYTES) if reachable(server, following) else b""
        for server, following in pairwise(servers)
    ]
    targets = [
        pb.PushTarget(server_id=server.server_id, address=server.address, certificate=server.certificate, push_key=key)
        if key
        else None
        for server, key in zip(servers[1:], keys[1:], strict=True)
    ]
    return [Link(key, target) for key, target in zip(keys, [*targets, None], strict=True)]


async def link_legs(
    legs: Sequence[Leg],
    step: int,
    reachable: Callable[[Server, Server], bool],
    lose: Callable[[Leg, ShoalError], None],
) -> None:
    """Link all legs, which have streams and nothing under way, from step `step` on; `lose` those that fail."""
    streams = [leg.stream for leg in legs if leg.stream is not None]
    links = plan_links([stream.hop.server for stream in streams], reachable)
    if not any(link.next_hop for link in links):
        return

    async def tell(leg: Leg, link: Link) -> None:
        assert leg.stream is not None
        try:
            await leg.stream.link(pb.LinkRequest(push_key=link.push_key, next_hop=link.next_hop, step=step))
        except ShoalError as error:
            lose(leg, error)
        else:
            leg.pushes = link.next_hop is not None

    await asyncio.gather(*(tell(leg, link) for leg, link in zip(legs, links, strict=True)))
