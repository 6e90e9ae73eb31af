"""The registry's RPCs: translate, delegate, translate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from services.chassis.auth import MethodPolicy, Scheme, allow, current_claims
from services.chassis.models import EVERY_MODEL, Wanted, choose
from services.registry.adopt import Adopter
from services.registry.announce import AnnounceStream, Announcing
from services.registry.directives import OPERATORS_S, DirectiveDesk
from services.registry.domain.pages import after, batches, page_size
from services.registry.frames import frames
from services.registry.watchers import Watchers
from shoal.swarm.coverage import block_coverage
from shoal.v1 import common_pb2, registry_pb2, registry_pb2_grpc, swarm_pb2
from shoal.wire.clock import from_duration, now_s, to_duration, to_timestamp
from shoal.wire.errors import InvalidRequest, QueueFull
from shoal.wire.records import (
    MAX_DURATION_S,
    MAX_NAME_CHARACTERS,
    PROTOCOL,
    check_protocol,
    model_to_proto,
    server_to_entry,
)
from shoal.wire.tokens import Role, TokenSigner

SERVICE = "shoal.v1.RegistryService"
POLICY: Mapping[str, MethodPolicy] = MappingProxyType(
    {
        f"/{SERVICE}/GetSwarmInfo": allow(scheme=Scheme.API_KEY),
        f"/{SERVICE}/AnnounceServer": allow(Role.SERVER),
        f"/{SERVICE}/ListServers": allow(),
        f"/{SERVICE}/GetCoverage": allow(),
        f"/{SERVICE}/WatchSwarm": allow(),
        f"/{SERVICE}/AdoptRecords": allow(Role.SERVICE, Role.OPERATOR),
        f"/{SERVICE}/DirectServers": allow(Role.SERVICE, Role.OPERATOR),
        f"/{SERVICE}/GetDirectives": allow(Role.SERVICE, Role.OPERATOR),
        f"/{SERVICE}/DrainServer": allow(Role.OPERATOR),
        f"/{SERVICE}/PauseServer": allow(Role.OPERATOR),
        f"/{SERVICE}/ResumeServer": allow(Role.OPERATOR),
    }
)
# A watcher whose connection takes nothing for so long is stuck, not slow.
WRITE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class SwarmFacts:
    """What members are told when they join, and the signer of their tokens."""

    signer: TokenSigner
    routers: Sequence[registry_pb2.ServiceEndpoint]
    token_ttl_s: float
    heartbeat_s: float
    enrolment_ttl_s: float
    dht_peers: Sequence[str]


class RegistryService(registry_pb2_grpc.RegistryServiceServicer):
    """Answers from the hub's snapshot; only announcements and directives reach a store."""

    def __init__(self, facts: SwarmFacts, announcing: Announcing, watchers: Watchers, desk: DirectiveDesk) -> None:
        self._facts = facts
        self._announcing = announcing
        self._hub = announcing.hub
        self._watchers = watchers
        self._desk = desk
        self._adopter = Adopter(announcing)
        self._token_keys = facts.signer.key_set().to_protos()

    async def GetSwarmInfo(
        self, request: registry_pb2.GetSwarmInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.GetSwarmInfoResponse:
        """Tell how to join, with a token for the owner of the API key."""
        check_protocol(request.protocol, "the caller")
        claims, now, ttl_s = current_claims(), now_s(), self._facts.token_ttl_s
        models = sorted(self._hub.snapshot.models().items(), key=lambda item: str(item[0]))
        return registry_pb2.GetSwarmInfoResponse(
            protocol=PROTOCOL,
            swarm_id=self._facts.signer.swarm_id,
            routers=self._facts.routers,
            token_keys=self._token_keys,
            access_token=self._facts.signer.issue(claims.account, claims.role, ttl_s, now),
            access_token_expires_at=to_timestamp(int(now + ttl_s)),
            dht_peers=self._facts.dht_peers,
            models=[
                registry_pb2.ServedModel(model=model_to_proto(model), num_blocks=num_blocks)
                for model, num_blocks in models
            ],
        )

    async def AnnounceServer(
        self,
        request_iterator: AsyncIterator[registry_pb2.AnnounceServerRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[registry_pb2.AnnounceServerResponse]:
        """Grant a lease for each record and heartbeat, and tell the server what it is to do."""
        account, told = current_claims().account, set[str]()
        stream = AnnounceStream(self._announcing, account, seen_from=_host(context.peer()))
        async for grant in stream.follow(aiter(request_iterator)):
            lease = registry_pb2.LeaseGranted(
                ttl=to_duration(self._announcing.lease_ttl_s),
                heartbeat_interval=to_duration(self._facts.heartbeat_s),
                revision=grant.position.revision,
                token_keys=self._token_keys,
                enrolment=self._enrol(account, stream.enrolling),
            )
            yield registry_pb2.AnnounceServerResponse(lease=lease)
            for directive in self._desk.of_server(stream.server_id, told):
                told.add(directive.directive_id)
                yield registry_pb2.AnnounceServerResponse(directive=directive)

    def _enrol(self, account: str, server_id: str | None) -> str:
        facts = self._facts
        return facts.signer.enrol(account, server_id, facts.enrolment_ttl_s, now_s()) if server_id else ""

    async def AdoptRecords(
        self, request: registry_pb2.AdoptRecordsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.AdoptRecordsResponse:
        """Give leases to servers whose records were found in the DHT."""
        counts, revision = await self._adopter.adopt(request.records)
        listed = [registry_pb2.AdoptCount(outcome=outcome, count=counts[outcome]) for outcome in sorted(counts)]
        return registry_pb2.AdoptRecordsResponse(counts=listed, revision=revision)

    async def DirectServers(
        self, request: registry_pb2.DirectServersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.DirectServersResponse:
        """Give directives to servers."""
        return registry_pb2.DirectServersResponse(directives=await self._desk.give(request.directives))

    async def GetDirectives(
        self, request: registry_pb2.GetDirectivesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.GetDirectivesResponse:
        """Tell how far directives are."""
        return registry_pb2.GetDirectivesResponse(directives=await self._desk.find(request))

    async def DrainServer(
        self, request: registry_pb2.DrainServerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.DrainServerResponse:
        """Let a server hand over its sessions and go."""
        order = registry_pb2.Directive(directive_id=request.request_id, drain=_drain_order(request.grace))
        one = registry_pb2.DirectiveFor(server_id=request.server_id, directive=order)
        return registry_pb2.DrainServerResponse(directive=await self._desk.give_leaving(one, force=request.force))

    async def PauseServer(
        self, request: registry_pb2.PauseServerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.PauseServerResponse:
        """Let a server hand over its sessions and stay idle."""
        order = registry_pb2.Directive(directive_id=request.request_id, pause=_drain_order(request.grace))
        one = registry_pb2.DirectiveFor(server_id=request.server_id, directive=order)
        return registry_pb2.PauseServerResponse(directive=await self._desk.give_leaving(one, force=request.force))

    async def ResumeServer(
        self, request: registry_pb2.ResumeServerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.ResumeServerResponse:
        """Let a paused server serve again."""
        order = registry_pb2.Directive(directive_id=request.request_id, resume=registry_pb2.ResumeOrder())
        order.expires_at.CopyFrom(to_timestamp(now_s() + OPERATORS_S))
        one = registry_pb2.DirectiveFor(server_id=request.server_id, directive=order)
        return registry_pb2.ResumeServerResponse(directive=(await self._desk.give([one]))[0])

    async def ListServers(
        self, request: registry_pb2.ListServersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.ListServersResponse:
        """Give a page of the servers, ordered by id."""
        wanted, snapshot = _wanted(request.model), self._hub.snapshot
        ids = sorted(key for key, server in snapshot.servers.items() if wanted.fits(server.model))
        behind = ids[after(ids, request.page_token) :]
        entries = (server_to_entry(snapshot.servers[key]) for key in behind)
        page = next(batches(entries, swarm_pb2.ServerEntry.ByteSize, page_size(request.page_size)), [])
        token = behind[len(page) - 1] if len(page) < len(behind) else ""
        return registry_pb2.ListServersResponse(servers=page, next_page_token=token, revision=snapshot.revision)

    async def GetCoverage(
        self, request: registry_pb2.GetCoverageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.GetCoverageResponse:
        """Tell who holds each block of a model."""
        snapshot = self._hub.snapshot
        model = choose(_wanted(request.model), snapshot.models())
        blocks = [
            swarm_pb2.BlockCoverage(
                block=entry.block,
                online_servers=entry.online_servers,
                joining_servers=entry.joining_servers,
                free_tokens=entry.free_tokens,
            )
            for entry in block_coverage(snapshot, model)
        ]
        return registry_pb2.GetCoverageResponse(
            model=model_to_proto(model), blocks=blocks, revision=snapshot.revision, partial=self._hub.partial
        )

    async def WatchSwarm(  # type: ignore[override]  # grpc also takes a coroutine that writes
        self, request: registry_pb2.WatchSwarmRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Send a snapshot, then changes, until the watcher goes or lags too far behind."""
        with self._watchers.watching(_wanted(request.model), self._hub.snapshot) as watcher:
            while True:
                for frame in frames(await watcher.next()):
                    try:
                        async with asyncio.timeout(WRITE_TIMEOUT_S):
                            await context.write(frame)
                    except TimeoutError:
                        raise QueueFull(f"nothing was read for {WRITE_TIMEOUT_S:g} s; watch again") from None


def _drain_order(grace: Duration) -> registry_pb2.DrainOrder:
    if not 0 <= from_duration(grace) <= MAX_DURATION_S:
        raise InvalidRequest(f"the grace must be between 0 and {MAX_DURATION_S:.0f} s, got {from_duration(grace):g}")
    return registry_pb2.DrainOrder(grace=grace)


def _host(peer: str) -> str:
    """Return the address in grpc's name of a peer, such as `ipv4:192.0.2.7:53211`; its port says nothing."""
    return unquote(peer).partition(":")[2].rpartition(":")[0] or peer


def _wanted(model: common_pb2.ModelId) -> Wanted:
    if max(len(model.prefix), len(model.numeric_class), len(model.config_digest)) > MAX_NAME_CHARACTERS:
        raise InvalidRequest("a model's names have at most 256 characters, its digest 32 bytes")
    wanted = Wanted(model.prefix, model.config_digest, model.numeric_class)
    return EVERY_MODEL if wanted == EVERY_MODEL else wanted
