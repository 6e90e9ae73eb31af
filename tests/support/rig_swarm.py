"""Real block servers inside the test's process, and a client model connected to them: for tests of both together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import torch

from shoal.client.auto import build_model
from shoal.client.config import SequenceManagerConfig
from shoal.client.connection import RemoteModel, SwarmConnection
from shoal.client.loop import LoopThread
from shoal.client.routes import SnapshotRoutes
from shoal.models.checkpoint import Checkpoint
from shoal.models.identity import model_key
from shoal.swarm.snapshot import Load, Server, ServerState, Signed, Speed, SwarmSnapshot
from shoal.wire.clock import now_s
from shoal.wire.identity import IdentityKey
from shoal.wire.tokens import Role, TokenSigner
from tests.support.block_rig import SWARM_ID, BlockRig, block_rig
from tests.support.fault_proxy import FaultProxy
from tests.support.tiny_models import load_reference


class _Member:
    """A member of no swarm, with a token that the servers take."""

    info = None

    def __init__(self, signer: TokenSigner) -> None:
        self._signer = signer

    def token(self) -> str:
        return self._signer.issue("tester", Role.USER, 600, now_s())

    async def run(self) -> None:
        return

    async def refresh(self) -> None:
        return

    async def close(self) -> None:
        return


class RigSwarm:
    """Block servers over the cuts of a tiny model; `options` are settings of each.

    With `proxied` the client reaches each through a fault proxy of its own, in `proxies`.
    """

    def __init__(
        self,
        folder: Path,
        *cuts: str,
        config: SequenceManagerConfig | None = None,
        proxied: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.reference: Any = load_reference(folder)
        self._signer = TokenSigner(IdentityKey.generate(), SWARM_ID)
        self.servers_loop = LoopThread("rig-servers")
        self._stack = AsyncExitStack()
        self._leaving: dict[int, asyncio.Task[int]] = {}
        self.rigs: list[BlockRig] = [
            self.servers_loop.run(self._start(folder, cut, dict(options or {}))) for cut in cuts
        ]
        addresses = [rig.server.address for rig in self.rigs]
        self.proxies = [FaultProxy(address) for address in addresses] if proxied else []
        if proxied:
            addresses = [proxy.address for proxy in self.proxies]
        self.records = [self._record(rig, address) for rig, address in zip(self.rigs, addresses, strict=True)]
        family = self.checkpoint.family
        remote = RemoteModel(model_key(self.checkpoint, "fp32"), family, torch.float32)
        routes = SnapshotRoutes(SwarmSnapshot.of(self.records))
        member: Any = _Member(self._signer)
        self.connection = SwarmConnection(
            LoopThread("rig-client"), remote, routes, member, config or SequenceManagerConfig()
        )
        self.model: Any = build_model(self.checkpoint, self.connection)

    async def _start(self, folder: Path, cut: str, options: dict[str, Any]) -> BlockRig:
        return await self._stack.enter_async_context(block_rig(folder, cut, signer=self._signer, **options))

    def _record(self, rig: BlockRig, address: str) -> Server:
        return Server(
            server_id=rig.facts.server_id,
            address=address,
            certificate=rig.certificate.der,
            model=rig.facts.model,
            num_blocks=rig.facts.family.num_blocks,
            span=rig.servicer.facts.span,
            block_hashes=rig.servicer.facts.block_hashes,
            state=rig.lifecycle.state,
            capacity=rig.servicer.facts.capacity,
            speed=Speed(0.001, 0.0001, 0.001),
            load=Load(1 << 20),
            record=Signed(b"", rig.facts.server_id, b""),
        )

    def stop(self, index: int) -> None:
        """Stop a server at once, as if it were killed."""
        self.servers_loop.run(self.rigs[index].server.stop(0))

    def learn(self) -> None:
        """Let the client plan on what the servers are now."""
        addresses = [record.address for record in self.records]
        self.records = [self._record(rig, address) for rig, address in zip(self.rigs, addresses, strict=True)]
        self.connection._routes = SnapshotRoutes(SwarmSnapshot.of(self.records))

    def change(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Let a server change; the result comes when it has."""
        future = self.servers_loop.start(work)
        assert future is not None
        return future

    def leave(self, index: int, move_s: float, grace_s: float = 0.0) -> None:
        """Make a server take no new sessions and ask those it has to move; `left` waits until it is empty."""
        rig = self.rigs[index]

        async def begin() -> asyncio.Task[int]:
            rig.lifecycle.state = ServerState.DRAINING
            return asyncio.ensure_future(rig.servicer.leave(None, grace_s, move_s))

        self._leaving[index] = self.servers_loop.run(begin())

    def left(self) -> dict[int, int]:
        """Wait until all servers that leave are empty; return how many sessions each had to end."""

        async def wait(task: asyncio.Task[int]) -> int:
            return await task

        leaving, self._leaving = self._leaving, {}
        return {index: self.servers_loop.run(wait(task)) for index, task in leaving.items()}

    def after_steps(self, index: int, steps: int, do: Callable[[], None]) -> None:
        """Call `do` on a thread of its own when a server is asked for its next step but `steps`."""
        engine, left = self.rigs[index].engine, [steps]
        begin = engine.begin

        def counted(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                threading.Thread(target=do).start()
            return begin(*args, **options)

        engine.begin = counted  # type: ignore[method-assign]

    @property
    def pushed_steps(self) -> list[int]:
        """For each server, steps that the hop before has pushed into it."""
        return [rig.servicer.pushed_steps for rig in self.rigs]

    @property
    def open_sessions(self) -> int:
        """Sessions open on all servers."""
        return sum(rig.engine.load().open_sessions for rig in self.rigs)

    @property
    def left_open(self) -> dict[str, int]:
        """What sessions hold on all servers."""
        return {
            "streams": sum(rig.servicer.open_streams for rig in self.rigs),
            "pushes": sum(rig.servicer.awaited_pushes for rig in self.rigs),
            "used": sum(rig.free_at_start - rig.engine.load().free_token_blocks for rig in self.rigs),
        }

    def wait_free(self, timeout_s: float = 20.0) -> None:
        """Wait until nothing is held any more."""
        give_up_s = time.monotonic() + timeout_s
        while any(self.left_open.values()):
            assert time.monotonic() < give_up_s, self.left_open
            time.sleep(0.01)

    def close(self) -> None:
        """Close the client, then the servers."""
        self.connection.close()
        for proxy in self.proxies:
            proxy.close()
        self.servers_loop.run(self._stack.aclose())
        self.servers_loop.close()
        self.servers_loop.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
