"""A registry as a real TLS gRPC server with scripted answers, for tests of whoever talks to one.

`Swarm` holds keys, certificate and tokens of a made-up swarm; `FakeRegistry` answers what the test puts in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from services.chassis.auth import AuthInterceptor, MethodPolicy, Scheme, allow, current_claims
from services.chassis.server import Mount, ServiceServer, build_server
from shoal.swarm.snapshot import Server
from shoal.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from shoal.wire.channels import Keepalive, open_channel
from shoal.wire.clock import now_s, to_duration, to_timestamp
from shoal.wire.errors import NotAuthenticated
from shoal.wire.identity import IdentityKey
from shoal.wire.records import PROTOCOL, open_record, state_from_proto
from shoal.wire.swarm_url import SwarmUrl
from shoal.wire.tls import REGISTRY_NAME, fingerprint, make_certificate
from shoal.wire.tokens import Claims, KeySet, Role, TokenSigner, new_api_key

SERVICE = "shoal.v1.RegistryService"
PREFIX = f"/{SERVICE}/"
POLICY: dict[str, MethodPolicy] = {
    PREFIX + "GetSwarmInfo": allow(scheme=Scheme.API_KEY),
    PREFIX + "AnnounceServer": allow(Role.SERVER),
    PREFIX + "ListServers": allow(Role.USER, Role.OPERATOR),
    PREFIX + "GetCoverage": allow(),
    PREFIX + "WatchSwarm": allow(),
    PREFIX + "AdoptRecords": allow(Role.SERVICE, Role.OPERATOR),
    PREFIX + "DirectServers": allow(Role.SERVICE, Role.OPERATOR),
    PREFIX + "GetDirectives": allow(Role.SERVICE, Role.OPERATOR),
    PREFIX + "DrainServer": allow(Role.OPERATOR),
    PREFIX + "PauseServer": allow(Role.OPERATOR),
    PREFIX + "ResumeServer": allow(Role.OPERATOR),
}


class Swarm:
    """Keys and secrets of one made-up swarm."""

    def __init__(self, token_ttl_s: float = 60.0, role: Role = Role.USER) -> None:
        self.token_ttl_s = token_ttl_s
        self.role = role
        self.certificate = make_certificate(REGISTRY_NAME)
        self.signer = TokenSigner(IdentityKey.generate(), "swarm-1")
        self.api_key = new_api_key()
        self.api_key_checks = 0

    def key_set(self) -> KeySet:
        """Return the key set that the servers of the swarm use."""
        return self.signer.key_set()

    def token(self, role: Role = Role.USER, ttl_s: float = 60.0) -> str:
        """Return a token for `alice`."""
        return self.signer.issue("alice", role, ttl_s, now_s())

    async def check_api_key(self, api_key: str) -> Claims:
        """Accept the one API key."""
        self.api_key_checks += 1
        if api_key != self.api_key:
            raise NotAuthenticated("unknown API key; ask the operator for one")
        return Claims("alice", self.role, self.signer.swarm_id, now_s() + self.token_ttl_s)

    def url(self, port: int) -> SwarmUrl:
        """Return the URL of a registry at this port of 127.0.0.1."""
        return SwarmUrl("127.0.0.1", port, fingerprint(self.certificate.der))

    def channel(self, address: str, token: str | None = None, keepalive: Keepalive | None = None) -> grpc.aio.Channel:
        """Open a channel to a server with this swarm's certificate."""
        give: Callable[[], str] | None = None if token is None else lambda: token
        return open_channel(address, self.certificate.der, REGISTRY_NAME, give, keepalive)


class FakeRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """Answers from the functions that a test assigns; `GetSwarmInfo` works as it is."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.infos_given = 0
        self.routers: list[registry_pb2.ServiceEndpoint] = []
        self.adopted: list[common_pb2.SignedEnvelope] = []
        self.protocol = PROTOCOL
        self.list_servers: Callable[..., Any] = lambda request, context: registry_pb2.ListServersResponse()
        self.watch: Callable[..., AsyncIterator[Any]] | None = None
        self.announce: Callable[..., AsyncIterator[Any]] | None = None

    async def GetSwarmInfo(self, request: Any, context: Any) -> registry_pb2.GetSwarmInfoResponse:
        """Give a new token to the caller's account."""
        self.infos_given += 1
        claims, signer, ttl_s = current_claims(), self.swarm.signer, self.swarm.token_ttl_s
        return registry_pb2.GetSwarmInfoResponse(
            protocol=self.protocol,
            swarm_id=signer.swarm_id,
            routers=self.routers,
            token_keys=self.swarm.key_set().to_protos(),
            access_token=signer.issue(claims.account, claims.role, ttl_s, now_s()),
            access_token_expires_at=to_timestamp(now_s() + ttl_s),
        )

    async def AdoptRecords(self, request: Any, context: Any) -> registry_pb2.AdoptRecordsResponse:
        """Keep the records and say that all are adopted."""
        self.adopted += request.records
        count = registry_pb2.AdoptCount(outcome=registry_pb2.ADOPT_OUTCOME_ADOPTED, count=len(request.records))
        return registry_pb2.AdoptRecordsResponse(counts=[count], revision=1)

    async def DirectServers(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def GetDirectives(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def DrainServer(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def PauseServer(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def ResumeServer(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def ListServers(self, request: Any, context: Any) -> Any:
        """Run the test's function, awaiting what it returns if need be."""
        answer = self.list_servers(request, context)
        return await answer if hasattr(answer, "__await__") else answer

    async def GetCoverage(self, request: Any, context: Any) -> registry_pb2.GetCoverageResponse:
        """Know nothing."""
        return registry_pb2.GetCoverageResponse()

    async def WatchSwarm(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Pass on what the test's generator yields."""
        assert self.watch is not None
        async for answer in self.watch(request, context):
            yield answer

    async def AnnounceServer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """Pass on what the test's generator yields."""
        assert self.announce is not None
        async for answer in self.announce(request_iterator, context):
            yield answer


class OneServer:
    """The announce stream of one server as a registry sees it: what it said, and the directives that it is given.

    Assign `announce` to a `FakeRegistry`. `server` is its newest record. `told` has each state and span once, in order;
    `reports` the newest of each directive, `history` the states that each was reported in.
    """

    def __init__(self) -> None:
        self.streams = self.given = 0
        self.told: list[tuple[str, str]] = []
        self.reports: dict[str, registry_pb2.DirectiveReport] = {}
        self.history: dict[str, list[int]] = {}
        self.directives: list[registry_pb2.Directive] = []
        self.cut = False
        self.server: Server | None = None
        self._span = ""

    def state_of(self, directive_id: str) -> str:
        """Return the newest reported state of a directive, in lower case; empty if none came."""
        report = self.reports.get(directive_id)
        return "" if report is None else report_state(report)

    async def announce(self, frames: Any, context: Any) -> AsyncIterator[Any]:
        """Grant a lease for each frame; give each directive once on each stream."""
        self.streams += 1
        self.given = 0
        async for frame in frames:
            self._note(frame)
            lease = registry_pb2.LeaseGranted(ttl=to_duration(10.0), heartbeat_interval=to_duration(0.05))
            yield registry_pb2.AnnounceServerResponse(lease=lease)
            while self.given < len(self.directives):
                self.given += 1
                yield registry_pb2.AnnounceServerResponse(directive=self.directives[self.given - 1])
            if self.cut:
                self.cut = False
                return

    def _note(self, frame: registry_pb2.AnnounceServerRequest) -> None:
        if frame.WhichOneof("frame") == "record":
            self.server = server = open_record(frame.record, now_s())
            self._span, state = str(server.span), server.state
        else:
            state = state_from_proto(frame.heartbeat.state)
        if not self.told or self.told[-1] != (state.value, self._span):
            self.told.append((state.value, self._span))
        for report in frame.heartbeat.directives:
            self.reports[report.directive_id] = report
            states = self.history.setdefault(report.directive_id, [])
            if not states or states[-1] != report.state:
                states.append(report.state)


def report_state(report: registry_pb2.DirectiveReport) -> str:
    """Return a report's state in lower case."""
    return registry_pb2.DirectiveState.Name(report.state).removeprefix("DIRECTIVE_STATE_").lower()


@asynccontextmanager
async def serving(
    registry: FakeRegistry, listen: str = "127.0.0.1:0", keepalive: Keepalive | None = None
) -> AsyncIterator[ServiceServer]:
    """Serve the registry through the chassis until the block ends."""
    swarm = registry.swarm
    auth = AuthInterceptor(POLICY, swarm.key_set, swarm.check_api_key)
    mount = Mount(SERVICE, lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server))
    server = build_server([mount], listen, swarm.certificate, auth, keepalive=keepalive)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)
