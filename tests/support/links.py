"""A control plane whose every link goes through a fault proxy of its own, and block servers that announce by it.

with LinkedPlane(folder, database_url, redis_url) as linked:
    linked.links[Link.ROUTER_REGISTRY].set_fault(silent=True)
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit, urlunsplit

import torch

from services.block_server.announcer import Announcer
from services.block_server.facts import Facts
from services.block_server.lifecycle import Lifecycle
from services.block_server.signing import Announced, RecordSigner
from shoal.models.families import describe
from shoal.swarm.snapshot import Capacity, Load, ModelKey, ServerState
from shoal.swarm.spans import Span
from shoal.wire.identity import IdentityKey
from shoal.wire.membership import Membership
from shoal.wire.tls import make_certificate
from tests.support.control_plane import ControlPlane
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.tiny_models import tiny_config
from tests.support.waiting import wait_until

LEASE_TTL_S = 1.5
KINDS = ("cut", "half close", "black hole", "delay", "throttle")
SEEDS = [int(seed) for seed in os.environ.get("SHOAL_CHAOS_SEED", "1").split()]


class Link(StrEnum):
    """Who calls whom."""

    SERVER_REGISTRY = "block server and registry"
    CLIENT_REGISTRY = "client and registry"
    CLIENT_ROUTER = "client and router"
    ROUTER_REGISTRY = "router and registry"
    REGISTRY_VALKEY = "registry and Valkey"
    REGISTRY_POSTGRES = "registry and PostgreSQL"


# What the services hold open by themselves.
_HELD = (Link.ROUTER_REGISTRY, Link.REGISTRY_VALKEY)


class LinkedPlane:
    """Registry and router as processes. Between two tests `heal` repairs the links."""

    def __init__(self, folder: Path, database_url: str, redis_url: str) -> None:
        self._stack = ExitStack()
        self.links: dict[Link, FaultProxy] = {}
        self.plane = ControlPlane(
            folder,
            self._through(Link.REGISTRY_POSTGRES, database_url),
            self._through(Link.REGISTRY_VALKEY, redis_url),
            lease_ttl_s=LEASE_TTL_S,
            router_by=lambda address: self._open(Link.CLIENT_ROUTER, address),
            registry_by=lambda address: self._open(Link.ROUTER_REGISTRY, address),
        )
        for link in (Link.SERVER_REGISTRY, Link.CLIENT_REGISTRY):
            self._open(link, self.plane.addresses["registry"])

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.plane)
            self.heal()
        except BaseException:  # what was started must end
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def heal(self) -> None:
        """Take back all faults, break what may have suffered, and wait until the services have connected again."""
        for proxy in self.links.values():
            if proxy.touched:
                proxy.set_fault()
                proxy.touched = False
                proxy.cut_all()
        for link in _HELD:
            assert wait_until(lambda: self.links[link].open_connections > 0), link  # noqa: B023

    def address(self, link: Link) -> str:
        """Return where a link's proxy listens."""
        return self.links[link].address

    def _open(self, link: Link, address: str) -> str:
        self.links[link] = self._stack.enter_context(FaultProxy(address))
        return self.links[link].address

    def _through(self, link: Link, url: str) -> str:
        parts = urlsplit(url)
        address = self._open(link, f"{parts.hostname}:{parts.port}")
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}{address}"))


class AnnouncedServer:
    """A block server's announcer as it is, without the server; `granted` counts leases."""

    def __init__(self, member: Membership) -> None:
        key = IdentityKey.generate()
        family = describe(tiny_config("llama"))
        hashes = tuple(hashlib.sha256(f"link {block}".encode()).digest() for block in range(family.num_blocks))
        facts = Facts(
            server_id=key.server_id,
            model=ModelKey("links", b"l" * 32, "fp32"),
            family=family,
            span=Span(0, family.num_blocks),
            block_hashes=hashes,
            dtype=torch.float32,
            capacity=Capacity(1 << 20, 512, 64, 512),
            max_sessions=8,
            idle_timeout_s=60.0,
        )
        self.server_id = key.server_id
        self.lifecycle = Lifecycle()
        self.lifecycle.state = ServerState.ONLINE
        announced = Announced("127.0.0.1:4000", make_certificate(key.server_id).der, "announced", "test")
        signer = RecordSigner(key, lambda: facts, self.lifecycle, announced, lambda: Load(1 << 20))
        self.announcer = Announcer(signer, member)

    @asynccontextmanager
    async def announced(self) -> AsyncIterator[None]:
        """Announce inside the block, which is entered with a lease."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.announcer.run())
            assert await self.announcer.announce(30.0)
            yield
            task.cancel()


def draw(generator: random.Random, kind: str, most_bytes: int) -> Fault:
    """Return a fault that strikes within so many bytes, in one direction or both."""
    after = generator.randrange(most_bytes)
    up, down = generator.choice([(True, False), (False, True), (True, True)])
    match kind:
        case "cut":
            return Fault(up, down, cut_after=after)
        case "half close":
            return Fault(up, down, half_close_after=after)
        case "black hole":
            return Fault(up, down, swallow_after=after)
        case "delay":
            return Fault(up, down, delay_s=generator.uniform(0.01, 0.1))
        case _:
            return Fault(up, down, bytes_per_s=generator.randrange(5_000, 20_000))
