"""Being a member of a swarm: joining by URL and API key, and keeping the access token and key set fresh.

Promises that what was learned last stays usable while the registry is away: `run()` keeps trying, nothing
is thrown away, and with a memory file a new process starts from what the last one learned. Owns the channels
to registry and router until `close()`. One event loop; `token()` is safe in any thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
import grpc.aio

from shoal.v1 import registry_pb2, registry_pb2_grpc
from shoal.wire.channels import Keepalive, open_channel
from shoal.wire.clock import backoff_s, from_timestamp, jitter, now_s
from shoal.wire.errors import ServerUnreachable, ShoalError, TimedOut, Unavailable
from shoal.wire.logs import get_logger
from shoal.wire.memory import Remembered, recall, remember
from shoal.wire.records import PROTOCOL, check_protocol
from shoal.wire.status import from_rpc_error
from shoal.wire.swarm_url import SwarmUrl, fetch_certificate
from shoal.wire.tls import certificate_name
from shoal.wire.tokens import KeySet

CALL_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
# Who remembers the swarm waits no longer for a registry that may be away.
IMPATIENT_TIMEOUT_S = 2.0
RENEW_AT = 2 / 3
SHORTEST_WAIT_S = 0.2
LONGEST_WAIT_S = 3600.0
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 15.0


@dataclass(frozen=True, slots=True)
class _Known:
    """What the registry said last; replaced as a whole."""

    info: registry_pb2.GetSwarmInfoResponse
    key_set: KeySet
    received_at_s: float

    @property
    def expires_at_s(self) -> float:
        return from_timestamp(self.info.access_token_expires_at)


class Membership:
    """A member's view of the swarm. Made by `join`; `run()` keeps it fresh; `close()` ends it."""

    def __init__(
        self,
        url: SwarmUrl,
        api_key: str,
        certificate: bytes,
        keepalive: Keepalive | None = None,
        memory: Path | None = None,
    ) -> None:
        """Prepare without any call; use `join`."""
        self.url = url
        self._api_key = api_key
        self._certificate = certificate
        self._tls_name = certificate_name(certificate)
        self._keepalive = keepalive
        self._memory = memory
        self._known: _Known | None = None
        self.live = False
        self._registry: grpc.aio.Channel | None = None
        self._routers: dict[tuple[str, bytes], grpc.aio.Channel] = {}
        self._router_lock = asyncio.Lock()
        self._log = get_logger("shoal.membership")

    @classmethod
    async def join(
        cls,
        url: SwarmUrl,
        api_key: str,
        *,
        wait_s: float = 0.0,
        keepalive: Keepalive | None = None,
        memory: Path | None = None,
    ) -> Self:
        """Fetch and check the registry's certificate, get the swarm's data and a token.

        `wait_s`: how long to keep trying while the registry does not answer. `memory`: file that keeps what the
        registry says; when it holds something, that is used at once instead of waiting, and `live` is False.

        Raises:
            NotAuthenticated: if certificate or key are wrong.
            ServerUnreachable, TimedOut: if the registry does not answer.
            Incompatible: if it speaks another protocol.
        """
        known = recall(memory, url, api_key) if memory else None
        if known is not None:
            member = cls(url, api_key, known.certificate, keepalive, memory)
            await member._refresh_or_take(known)
            return member
        give_up_at = time.monotonic() + wait_s
        attempt = 0
        while True:
            try:
                certificate = await asyncio.to_thread(fetch_certificate, url, CONNECT_TIMEOUT_S)
                member = cls(url, api_key, certificate, keepalive, memory)
                await member.refresh()
                return member
            except (Unavailable, TimedOut):
                pause_s = backoff_s(attempt, FIRST_RETRY_S, 2.0)
                if time.monotonic() + pause_s > give_up_at:
                    raise
            attempt += 1
            await asyncio.sleep(pause_s)

    async def _refresh_or_take(self, known: Remembered) -> None:
        """Ask the registry; take what is remembered if it does not answer soon."""
        try:
            await self.refresh(IMPATIENT_TIMEOUT_S)
        except (Unavailable, TimedOut) as error:
            key_set = KeySet.from_protos(known.info.token_keys, known.info.swarm_id)
            self._known = _Known(known.info, key_set, now_s())
            self._log.warning("swarm.remembered", reason=error.reason, token_left_s=round(self.token_left_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def info(self) -> registry_pb2.GetSwarmInfoResponse:
        """What the registry said last."""
        return self._last().info

    @property
    def key_set(self) -> KeySet:
        """The newest keys that sign access tokens."""
        return self._last().key_set

    @property
    def token_left_s(self) -> float:
        """Seconds until the newest access token ends; negative after its end."""
        return self._last().expires_at_s - now_s()

    def token(self) -> str:
        """Return the newest access token.

        After its end it is still given: the called side says what is wrong.
        """
        return self._last().info.access_token

    @property
    def registry(self) -> grpc.aio.Channel:
        """The channel to the registry, with the access token."""
        if self._registry is None:
            self._registry = open_channel(
                self.url.address, self._certificate, self._tls_name, self.token, self._keepalive
            )
        return self._registry

    async def router(self) -> grpc.aio.Channel:
        """Return a channel to the first router that can be connected, with the access token.

        Raises:
            Unavailable: if the swarm has no router, or none answers.
        """
        async with self._router_lock:
            endpoints = list(self.info.routers)
            await self._forget_routers({(endpoint.address, endpoint.certificate) for endpoint in endpoints})
            for endpoint in endpoints:
                channel = self._router_channel(endpoint)
                if await _connects(channel):
                    return channel
        addresses = ", ".join(endpoint.address for endpoint in endpoints)
        raise Unavailable(f"no router answers at {addresses}" if addresses else "the swarm has no router")

    async def refresh(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Ask the registry again for the swarm's data, keys and a new token. On failure what was known stays.

        Raises:
            ShoalError: what the registry or the connection said.
        """
        # No access token on this channel: the call takes the API key instead.
        async with open_channel(
            self.url.address, self._certificate, self._tls_name, keepalive=self._keepalive
        ) as channel:
            call = registry_pb2_grpc.RegistryServiceStub(channel).GetSwarmInfo(
                registry_pb2.GetSwarmInfoRequest(protocol=PROTOCOL),
                metadata=(("authorization", f"ApiKey {self._api_key}"),),
                timeout=timeout_s,
            )
            try:
                info = await call
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
        check_protocol(info.protocol, f"the registry at {self.url.address}")
        self._known = _Known(info, KeySet.from_protos(info.token_keys, info.swarm_id), now_s())
        self.live = True
        if self._memory is not None:
            await asyncio.to_thread(
                remember, self._memory, self.url, self._api_key, Remembered(self._certificate, info)
            )

    def adopt_keys(self, keys: Iterable[registry_pb2.TokenKey]) -> None:
        """Take over a newer key set that came another way, as with a lease; an empty one is ignored.

        Raises:
            Corrupted: if one is not a key.
        """
        known, keys = self._last(), list(keys)
        if keys:
            key_set = KeySet.from_protos(keys, known.info.swarm_id)
            self._known = _Known(known.info, key_set, known.received_at_s)

    async def run(self) -> None:
        """Renew the token after each two thirds of its life; after a failure retry. Never ends."""
        failures = 0 if self.live else 1
        while True:
            await asyncio.sleep(self._renew_in_s() if failures == 0 else self._retry_in_s(failures - 1))
            try:
                await self.refresh()
            except ShoalError as error:
                failures += 1
                left_s = round(self.token_left_s)
                self._log.warning("swarm.refresh_failed", reason=error.reason, failures=failures, token_left_s=left_s)
            else:
                failures = 0
                self._log.debug("swarm.refreshed", expires_in_s=round(self.token_left_s))

    async def close(self) -> None:
        """Close all channels. May be called again."""
        channels = [*self._routers.values(), *([self._registry] if self._registry else [])]
        self._routers.clear()
        self._registry = None
        for channel in channels:
            await channel.close()

    def _last(self) -> _Known:
        if self._known is None:
            raise ServerUnreachable("the swarm was not joined yet")
        return self._known

    def _renew_in_s(self) -> float:
        known = self._last()
        renew_at_s = known.received_at_s + (known.expires_at_s - known.received_at_s) * RENEW_AT
        wait_s = (renew_at_s - now_s()) * jitter(0.95, 1.0)  # members that joined together spread out
        return min(max(wait_s, SHORTEST_WAIT_S), LONGEST_WAIT_S)

    def _retry_in_s(self, failures: int) -> float:
        return backoff_s(failures, FIRST_RETRY_S, LONGEST_RETRY_S)

    def _router_channel(self, endpoint: registry_pb2.ServiceEndpoint) -> grpc.aio.Channel:
        key = (endpoint.address, endpoint.certificate)
        if key not in self._routers:
            self._routers[key] = open_channel(
                endpoint.address, endpoint.certificate, endpoint.tls_name, self.token, self._keepalive
            )
        return self._routers[key]

    async def _forget_routers(self, listed: set[tuple[str, bytes]]) -> None:
        for key in set(self._routers) - listed:
            await self._routers.pop(key).close()


async def _connects(channel: grpc.aio.Channel) -> bool:
    """Tell whether the channel is or gets connected; a refusal counts at once."""
    state = channel.get_state(try_to_connect=True)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        return False
    return state is grpc.ChannelConnectivity.READY
