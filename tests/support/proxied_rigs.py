"""Real block servers inside the test's process, and a client that reaches each through a fault proxy; no control plane.

with ProxiedRigs(folder, "0:3", "3:6") as swarm:
    swarm.model.generate(...)
"""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch

from shoal.client.auto import build_model
from shoal.client.config import SequenceManagerConfig
from shoal.client.connection import RemoteModel, SwarmConnection
from shoal.client.loop import LoopThread
from shoal.client.routes import SnapshotRoutes
from shoal.models.checkpoint import Checkpoint
from shoal.swarm.snapshot import Load, Server, ServerState, Signed, Speed, SwarmSnapshot
from shoal.wire.clock import now_s
from shoal.wire.identity import IdentityKey
from shoal.wire.tokens import Role, TokenSigner
from tests.support.block_rig import SWARM_ID, BlockRig, block_rig
from tests.support.fault_proxy import FaultProxy


class ProxiedRigs:
    """Servers of the cuts of a model; `options` are settings of each."""

    def __init__(self, folder: Path, *cuts: str, config: SequenceManagerConfig, **options: Any) -> None:
        self._signer = TokenSigner(IdentityKey.generate(), SWARM_ID)
        self._loop = LoopThread("block-servers")
        self._servers, self._stack = AsyncExitStack(), ExitStack()
        self.rigs: list[BlockRig] = []
        for cut in cuts:
            entering = self._servers.enter_async_context(block_rig(folder, cut, signer=self._signer, **options))
            self.rigs.append(self._loop.run(entering))
        self.proxies = [self._stack.enter_context(FaultProxy(rig.server.address)) for rig in self.rigs]
        checkpoint = Checkpoint.open(folder)
        facts = self.rigs[0].facts
        routes = SnapshotRoutes(SwarmSnapshot.of(map(_described, self.rigs, self.proxies)))
        member: Any = _Member(self._signer)
        remote = RemoteModel(facts.model, checkpoint.family, torch.float32)
        self.connection = SwarmConnection(LoopThread("client"), remote, routes, member, config)
        self.model: Any = build_model(checkpoint, self.connection)

    @property
    def open_sessions(self) -> int:
        """Sessions open on all servers."""
        return sum(rig.engine.load().open_sessions for rig in self.rigs)

    @property
    def all_free(self) -> bool:
        """Tell whether no server holds any cache."""
        return all(rig.engine.load().free_token_blocks == rig.facts.capacity.cache_token_blocks for rig in self.rigs)

    def close(self) -> None:
        """Close the client, then the servers."""
        self.connection.close()
        self._stack.close()
        self._loop.run(self._servers.aclose())
        self._loop.close()
        self._loop.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Member(SimpleNamespace):
    """Stands in for the membership of the servers' swarm."""

    def __init__(self, signer: TokenSigner) -> None:
        super().__init__(info=SimpleNamespace(models=()))
        self._signer = signer

    def token(self) -> str:
        return self._signer.issue("tester", Role.USER, 600, now_s())

    async def run(self) -> None:
        return

    async def refresh(self) -> None:
        return

    async def close(self) -> None:
        return


def _described(rig: BlockRig, proxy: FaultProxy) -> Server:
    facts = rig.facts
    server = Server(
        server_id=facts.server_id,
        address=rig.server.address,
        certificate=rig.certificate.der,
        model=facts.model,
        num_blocks=facts.family.num_blocks,
        span=facts.span,
        block_hashes=facts.block_hashes,
        state=ServerState.ONLINE,
        capacity=facts.capacity,
        speed=Speed(0.001, 0.0001, 0.001),
        load=Load(facts.capacity.cache_token_blocks),
        record=Signed(b"", facts.server_id, b""),
    )
    return replace(server, address=proxy.address)
