"""The router's picture of the swarm: follows the registry's watch stream, and keeps the last picture without it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc.aio

from services.chassis.loops import keep_trying
from services.router.domain.carrying import CARRY_S, Carried
from shoal.swarm.snapshot import RevisionGap, SwarmSnapshot
from shoal.v1 import registry_pb2, registry_pb2_grpc
from shoal.wire.clock import now_s
from shoal.wire.errors import Contended, ShoalError, Unavailable
from shoal.wire.logs import get_logger
from shoal.wire.records import delta_from_proto, snapshot_from_proto
from shoal.wire.status import from_rpc_error


class Frames(Protocol):
    """Opens a watch stream; its errors are ShoalErrors."""

    def __call__(self) -> AsyncIterator[registry_pb2.WatchSwarmResponse]:
        """Yield frames until the stream breaks."""
        ...


class SwarmPicture:
    """Holds the newest snapshot. `run` keeps it up to date."""

    def __init__(
        self,
        frames: Frames,
        longest_pause_s: float,
        monotonic_s: Callable[[], float] = time.monotonic,
        carry_s: float = CARRY_S,
    ) -> None:
        self._frames = frames
        self._longest_pause_s = longest_pause_s
        self._monotonic_s = monotonic_s
        self._carry_s = carry_s
        self._carried = Carried()
        self._snapshot: SwarmSnapshot | None = None
        self._log = get_logger("services.router.registry_client")

    @property
    def snapshot(self) -> SwarmSnapshot:
        """The newest snapshot; partial for a while after the registry came back empty.

        Raises:
            Unavailable: before the first one came.
        """
        if self._snapshot is None:
            raise Unavailable("the router has not heard from the registry yet; try again, or plan without it")
        return self._carried.shown_with(self._snapshot, self._monotonic_s())

    async def run(self) -> None:
        """Follow the stream; open it again with growing pauses when it breaks. Never ends."""
        await keep_trying("watch", self.follow, (ShoalError,), self._longest_pause_s)

    async def follow(self) -> None:
        """Follow one stream to its end.

        Raises:
            ShoalError: what the registry or the connection said; Contended if a change does not fit the last picture.
        """
        current: SwarmSnapshot | None = None
        async for frame in self._frames():
            current = self._after(current, frame)
            self._snapshot = current

    def _after(self, current: SwarmSnapshot | None, frame: registry_pb2.WatchSwarmResponse) -> SwarmSnapshot:
        now = now_s()
        if frame.WhichOneof("frame") == "snapshot":
            whole = snapshot_from_proto(frame.snapshot, now, self._rejected)
            if self._snapshot is not None:
                self._carried = self._carried.begin(self.snapshot, whole, self._monotonic_s(), self._carry_s)
            return whole
        self._carried = self._carried.without(tuple(frame.delta.removals))
        if current is None:
            raise Contended("the watch stream began without a snapshot")
        try:
            return current.apply(delta_from_proto(frame.delta, now, self._rejected, current.servers))
        except RevisionGap as gap:
            raise Contended(f"a change was missed ({gap})") from gap

    def _rejected(self, server_id: str, error: ShoalError) -> None:
        self._log.warning("server.rejected", server_id=server_id, reason=error.reason)


def watch_frames(channel: Callable[[], grpc.aio.Channel]) -> Frames:
    """Return what opens watch streams on the channel."""

    async def frames() -> AsyncIterator[registry_pb2.WatchSwarmResponse]:
        stub = registry_pb2_grpc.RegistryServiceStub(channel())
        try:
            async for frame in stub.WatchSwarm(registry_pb2.WatchSwarmRequest()):
                yield frame
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    return frames
