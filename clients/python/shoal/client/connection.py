"""A client's connection to a swarm: who serves the model, channels to servers, sessions.

Owns one daemon thread with the event loop of all calls. Everything public may be called from any thread.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import time
import weakref
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import grpc.aio
import torch

from shoal.client.config import SequenceManagerConfig, SequenceManagerState
from shoal.client.discovery import Discovery
from shoal.client.encoding import CODECS, as_sent
from shoal.client.failures import Bans, judge
from shoal.client.hops import HopStream
from shoal.client.journal import Journal
from shoal.client.links import plan_links
from shoal.client.loop import LoopThread
from shoal.client.outputs import Output
from shoal.client.prefixes import page_chains
from shoal.client.routes import RouteSource
from shoal.client.session import InferenceSession
from shoal.models.families import Family
from shoal.models.identity import config_digest, dtype_of
from shoal.swarm.routing import Route, RouteRequest
from shoal.swarm.snapshot import ModelKey, Server
from shoal.swarm.spans import Span
from shoal.v1 import block_server_pb2 as pb
from shoal.v1.block_server_pb2_grpc import BlockServerServiceStub
from shoal.wire.channels import open_channel
from shoal.wire.clock import to_duration
from shoal.wire.errors import (
    InvalidRequest,
    NoRoute,
    ShoalError,
    TimedOut,
    TooLong,
    UnknownModel,
)
from shoal.wire.membership import Membership
from shoal.wire.memory import memory_path
from shoal.wire.records import PROTOCOL, model_to_proto, span_to_proto
from shoal.wire.status import from_rpc_error
from shoal.wire.swarm_url import known_peers, resolve_swarm
from shoal.wire.tensors import dtype_to_wire

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 5.0
_RETIRE_GRACE_S = 60.0
_UNREACHABLE_S = 300.0


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The model that a connection serves: identity, sizes, element type of activations."""

    key: ModelKey
    family: Family
    dtype: torch.dtype

    @property
    def blocks(self) -> Span:
        """All blocks."""
        return Span(0, self.family.num_blocks)


class SwarmConnection:
    """A connection to the servers of one model. Close it, or leave that to the end of the program."""

    def __init__(
        self,
        loop: LoopThread,
        model: RemoteModel,
        routes: RouteSource,
        membership: Membership,
        config: SequenceManagerConfig,
        discovery: Discovery | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.state = SequenceManagerState(Bans(first_s=config.ban_timeout_s))
        self._loop = loop
        self._routes = routes
        self._membership = membership
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._retired: list[asyncio.Future[None]] = []
        self._discovery = discovery
        self._keeper = loop.start(membership.run() if discovery is None else discovery.run())
        _close_at_exit(self)

    @classmethod
    def join(
        cls,
        family: Family,
        prefix: str,
        *,
        swarm: str | None = None,
        api_key: str | None = None,
        dtype: torch.dtype | None = None,
        config: SequenceManagerConfig | None = None,
        initial_peers: Sequence[str] = (),
    ) -> Self:
        """Join a swarm that serves the model.

        While its registry is away, what an earlier process of this user learned is enough: token, keys, and peers of
        the DHT, to which `initial_peers` and those of the swarm file are added.

        Raises:
            InvalidRequest: if no swarm is named; NotAuthenticated: if the key or certificate is refused.
            UnknownModel: if the swarm does not serve the model.
        """
        config = config or SequenceManagerConfig()
        url, key = resolve_swarm(swarm, api_key)
        loop = LoopThread(f"shoal-{prefix}")
        try:
            membership = loop.run(Membership.join(url, key, memory=memory_path(url, key)))
            discovery = Discovery(membership, [*initial_peers, *known_peers(url)])
            try:
                model = _choose_model(loop.run(discovery.models()), family, prefix, dtype)
            except ShoalError:
                loop.run(discovery.close())
                loop.run(membership.close())
                raise
        except BaseException:  # an interrupt too: nobody else would end the thread
            loop.close()
            raise
        routes = discovery.routes(model.key, config.connect_timeout_s)
        return cls(loop, model, routes, membership, config, discovery)

    @property
    def last_route(self) -> Route | None:
        """The newest route over all blocks."""
        return self.state.last_route

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        return self.model.family.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Element type of hidden states on the wire."""
        return self.model.dtype

    def open_session(
        self,
        *,
        rows: int = 1,
        max_tokens: int | None = None,
        prompt_tokens: int = 1,
        span: Span | None = None,
        prompt: Sequence[torch.Tensor] = (),
    ) -> InferenceSession:
        """Plan a route and open a session of `rows` sequences of at most `max_tokens` each on it.

        `span`: the blocks to run; all of them by default. `prompt`: the ids that each row begins with, if servers may
        go on from what they have computed for an equal beginning.

        Raises:
            TooLong: if the model does not take that many tokens.
            NoRoute, UnknownModel, CacheFull, NotAuthenticated, ...: what router and servers answered.
        """
        limit = self.model.family.max_positions
        if max_tokens is None:
            max_tokens = min(self.config.session_tokens, limit or self.config.session_tokens)
        if rows < 1 or max_tokens < 1:
            raise InvalidRequest(f"a session needs at least one row and one token, got {rows} and {max_tokens}")
        if limit is not None and max_tokens > limit:
            raise TooLong(
                f"{max_tokens} tokens are more than the {limit} that {self.model.key.prefix} takes: "
                "shorten the prompt or ask for fewer new tokens"
            )
        shared = prompt if self.config.share_prefixes else ()
        chains = page_chains(self.model.key, self.config.codec, shared)
        session = InferenceSession(self, span or self.model.blocks, rows, max_tokens)
        return session.open(prompt_tokens, chains if any(chains) else ())

    def new_journal(self, rows: int) -> Journal:
        """Return an empty journal for one hop of a session."""
        return Journal(rows, self.hidden_size, self.dtype, self.config.journal_bytes)

    async def plan(
        self, span: Span, rows: int, max_tokens: int, prompt_tokens: int, passed_over: Collection[str]
    ) -> Route:
        """Return the best route over `span` without the servers that are banned or passed over; one attempt.

        Bans for being broken may be mistaken, so they are set aside when there is no route without those servers.

        Raises:
            NoRoute, UnknownModel, ...: what the route source said.
        """
        now_s = time.monotonic()
        never = frozenset(self.config.blocked_servers) | frozenset(passed_over)
        request = RouteRequest(
            model=self.model.key,
            blocks=span,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            rows=rows,
            bytes_per_token=self.hidden_size * self.dtype.itemsize,
            allowed=frozenset(self.config.allowed_servers),
            blocked=never | self.state.bans.banned(now_s),
        )
        try:
            routes = await self._routes.routes(request)
        except NoRoute:
            wrong = never | self.state.bans.banned(now_s, only_wrong=True)
            if wrong == request.blocked:
                raise
            routes = await self._routes.routes(replace(request, blocked=wrong))
        if span == self.model.blocks:
            self.state.last_route = routes[0]
        return routes[0]

    def note_failure(self, error: ShoalError) -> None:
        """Learn from an error of a server, if one is named in it."""
        server_id = error.details.get("server_id")
        if server_id is None:
            return
        self.state.bans = self.state.bans.after(server_id, judge(error), time.monotonic())
        if isinstance(error, TimedOut):
            # The connection may be a black hole: the next session gets a new one.
            self._retire(server_id)

    def note_success(self, server_id: str) -> None:
        """Learn that a server did its work."""
        self.state.bans = self.state.bans.after_success(server_id)

    async def renew_token(self) -> None:
        """Try once to get a new access token."""
        with contextlib.suppress(ShoalError):
            await self._membership.refresh()

    def streams(self, route: Route, session_id: str, rows: int, max_tokens: int, push: bool) -> list[HopStream]:
        """Make a stream for each hop of a route; nothing is sent yet. With `push` each is told the next one."""
        timeouts = (self.config.connect_timeout_s, self.config.step_timeout_s)
        servers = [hop.server for hop in route.hops]
        links = plan_links(servers, self.reachable if push else lambda *_: False)
        streams = []
        for hop, link in zip(route.hops, links, strict=True):
            server = hop.server
            opening = pb.OpenSession(
                protocol=PROTOCOL,
                session_id=session_id,
                server_id=server.server_id,
                model=model_to_proto(self.model.key),
                span=span_to_proto(hop.span),
                block_hashes=[server.block_hash(block) for block in hop.span.blocks()],
                activation_dtype=dtype_to_wire(self.dtype),
                codec=CODECS[self.config.codec],
                rows=rows,
                max_tokens=max_tokens,
                cache_wait=to_duration(self.config.cache_wait_s),
                push_key=link.push_key,
                next_hop=link.next_hop,
            )
            channel = self._channel(server.server_id, server.address, server.certificate)
            streams.append(HopStream(hop, channel, opening, self.hidden_size, timeouts))
        return streams

    def as_sent(self, hidden: torch.Tensor) -> Output:
        """Return activations in the codec of this connection, with the values that come out of it."""
        return as_sent(hidden, CODECS[self.config.codec])

    def reachable(self, server: Server, following: Server) -> bool:
        """Tell whether a server may try to push to another one."""
        until_s = self.state.unreachable.get((server.server_id, following.server_id), 0.0)
        return until_s <= time.monotonic()

    def note_unreachable(self, server: Server, following: Server) -> None:
        """Learn that a server could not push to another one."""
        now_s = time.monotonic()
        known = {pair: until_s for pair, until_s in self.state.unreachable.items() if until_s > now_s}
        known[(server.server_id, following.server_id)] = now_s + _UNREACHABLE_S
        self.state.unreachable = known

    def server_info(self, server: Server) -> pb.GetServerInfoResponse:
        """Ask a server what it holds, how busy it is and what it has done.

        Raises:
            ShoalError: what it answered, or ServerUnreachable, TimedOut.
        """
        return self.run(self._server_info(server))

    async def _server_info(self, server: Server) -> pb.GetServerInfoResponse:
        channel = self._channel(server.server_id, server.address, server.certificate)
        try:
            return await BlockServerServiceStub(channel).GetServerInfo(
                pb.GetServerInfoRequest(protocol=PROTOCOL), timeout=self.config.connect_timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def _channel(self, server_id: str, address: str, certificate: bytes) -> grpc.aio.Channel:
        key = (server_id, address)
        if key not in self._channels:
            self._retire(server_id)  # a server that is back at another address is not at the old one any more
            self._channels[key] = open_channel(address, certificate, server_id, self._membership.token)
        return self._channels[key]

    def _retire(self, server_id: str) -> None:
        """Use the channels to a server no more; what is open on them has time to end."""
        for key in [key for key in self._channels if key[0] == server_id]:
            self._retired.append(asyncio.ensure_future(self._channels.pop(key).close(_RETIRE_GRACE_S)))
        self._retired = [closing for closing in self._retired if not closing.done()]

    def check_process(self) -> None:
        """Raise Unsupported in a child that was forked after the connection was made."""
        self._loop.check_process()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call on the connection's thread and return its result."""
        return self._loop.run(work)

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run closing work to its end; nothing is left to close when the connection is gone."""
        future = self._loop.start(work)
        if future is not None:
            with contextlib.suppress(TimeoutError):
                future.result(_CLOSE_TIMEOUT_S)

    def abandon(self, work: Coroutine[Any, Any, None]) -> None:
        """Start closing work without waiting; safe in finalisers on any thread."""
        self._loop.start(work)

    def close(self) -> None:
        """End all sessions and channels; harmless when done before."""
        if self._loop.running:
            self.finish(self._close())
            self._loop.close()
            self._loop.join(_CLOSE_TIMEOUT_S)

    async def _close(self) -> None:
        await _release(self._keeper, self._channels, self._membership, self._discovery)

    def __del__(self) -> None:
        self._loop.start(_release(self._keeper, self._channels, self._membership, self._discovery, self._loop))


async def _release(
    keeper: concurrent.futures.Future[None] | None,
    channels: dict[tuple[str, str], grpc.aio.Channel],
    membership: Membership,
    discovery: Discovery | None,
    loop: LoopThread | None = None,
) -> None:
    """Close all of a connection's parts, and the loop itself when it is given; harmless when done before."""
    if discovery is not None:
        await discovery.close()
    if keeper is not None:
        keeper.cancel()
    await asyncio.gather(*(channel.close() for channel in channels.values()), return_exceptions=True)
    channels.clear()
    await membership.close()
    if loop is not None:
        loop.close()


def _choose_model(served: Sequence[ModelKey], family: Family, prefix: str, dtype: torch.dtype | None) -> RemoteModel:
    """Pick the served model with the same config; the name decides between several, the element type too."""
    digest = config_digest(family.config)
    same = [model for model in served if model.config_digest == digest]
    named = [model for model in same if model.prefix == prefix] or same
    fitting = [model for model in named if dtype is None or dtype_of(model.numeric_class) == dtype]
    if len(fitting) != 1:
        listed = ", ".join(f"{model.prefix} ({model.numeric_class})" for model in served) or "none"
        wanted = f"{prefix} with this config" + (f" in {dtype}" if dtype is not None else "")
        why = "serves no" if not fitting else "serves several"
        raise UnknownModel(
            f"the swarm {why} {wanted}; it serves: {listed}. Start servers for it with "
            "`shoal server run`, or pass the model (and dtype) that is served"
        )
    key = ModelKey(fitting[0].prefix, digest, fitting[0].numeric_class)
    return RemoteModel(key, family, dtype_of(key.numeric_class))


def _close_at_exit(connection: SwarmConnection) -> None:
    """Close channels before the interpreter tears down threads, without keeping the connection alive."""
    reference = weakref.ref(connection)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    weakref.finalize(connection, atexit.unregister, close)
