"""Builds the registry from its settings and runs it; the only place that makes adapters."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from services.chassis.auth import AuthInterceptor
from services.chassis.loops import StopSignal, serve_until_stopped
from services.chassis.schema import await_schema
from services.chassis.server import Mount, build_server
from services.chassis.storage import database_engine, redis_client
from services.registry.announce import Announcing
from services.registry.directives import DirectiveDesk
from services.registry.health import report_stores
from services.registry.history import HistoryWriter
from services.registry.hub import SwarmHub
from services.registry.keys import KeyRing, read_keys_file
from services.registry.pins import PinBoard
from services.registry.reach import TIMEOUT_S, Reach
from services.registry.schema import REGISTRY_SCHEMA
from services.registry.service import POLICY, SERVICE, RegistryService, SwarmFacts
from services.registry.settings import RegistrySettings
from services.registry.store_archive_sql import SqlArchive
from services.registry.store_directives import RedisDirectives
from services.registry.store_leases_redis import RedisLeases
from services.registry.watchers import Watchers
from shoal.v1 import registry_pb2, registry_pb2_grpc
from shoal.wire.errors import InvalidRequest, ShoalError, Unavailable
from shoal.wire.identity import IdentityKey
from shoal.wire.logs import get_logger
from shoal.wire.swarm_url import split_address
from shoal.wire.tls import REGISTRY_NAME, certificate_name, load_or_create_certificate, pem_to_der
from shoal.wire.tokens import TokenSigner

TOKEN_KEY_FILE = "token.key.pem"


async def run(settings: RegistrySettings, stop: StopSignal) -> None:
    """Run the registry until asked to stop.

    Raises:
        Incompatible: if the database's schema is older than this software.
        Unavailable: if the database does not answer within `startup_wait_s`.
        InvalidRequest: if a file or URL of the settings is wrong.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)  # only reads the version here, but says more
    key = IdentityKey.load_or_create(settings.state_dir / TOKEN_KEY_FILE)
    certificate = load_or_create_certificate(settings.state_dir, REGISTRY_NAME)
    owners = read_keys_file(settings.api_keys_file) if settings.api_keys_file else {}
    signer = TokenSigner(key, swarm_id=key.server_id)
    engine = database_engine(settings.database_url.get_secret_value())
    redis = redis_client(settings.redis_url.get_secret_value())
    try:
        archive = SqlArchive(engine)
        await await_schema(engine, REGISTRY_SCHEMA, settings.startup_wait_s)
        await archive.add_keys(owners)
        watchers = Watchers(settings.watch_queue)
        leases = RedisLeases(redis)
        hub = SwarmHub(leases, watchers, lease_ttl_s=settings.lease_ttl_s, poll_s=settings.poll_s)
        history = HistoryWriter(archive)
        desk = DirectiveDesk(RedisDirectives(redis), hub, settings.poll_s, settings.lease_ttl_s)
        announcing = Announcing(
            leases, PinBoard(archive), history, hub, settings.lease_ttl_s, signer.key_set(), _reach(settings), desk
        )
        facts = _facts(settings, signer)
        service = RegistryService(facts, announcing, watchers, desk)
        auth = AuthInterceptor(POLICY, signer.key_set, KeyRing(archive, signer.swarm_id).check)
        mount = Mount(SERVICE, partial(registry_pb2_grpc.add_RegistryServiceServicer_to_server, service))
        server = build_server([mount], settings.listen, certificate, auth)
        await _take_over(leases, settings.lease_ttl_s)
        await hub.refresh()  # so that the first watcher is not told of an empty swarm
        loops = {
            "hub": hub.run(),
            "directives": desk.run(),
            "history": history.run(),
            "health": report_stores(server, hub, archive),
        }
        await serve_until_stopped(server, stop, settings, loops)
        await _last_words(history)
    finally:
        await redis.aclose()
        await engine.dispose()


def _reach(settings: RegistrySettings) -> Reach | None:
    # Twice that long may pass within a lease that is not renewed meanwhile.
    return Reach(min(TIMEOUT_S, settings.lease_ttl_s / 3)) if settings.verify_reachability else None


def _facts(settings: RegistrySettings, signer: TokenSigner) -> SwarmFacts:
    return SwarmFacts(
        signer=signer,
        routers=tuple(_read_router(router) for router in settings.routers),
        token_ttl_s=settings.token_ttl_s,
        heartbeat_s=settings.heartbeat_s,
        enrolment_ttl_s=settings.enrolment_ttl_s,
        dht_peers=tuple(settings.dht_peers),
    )


async def _take_over(leases: RedisLeases, lease_ttl_s: float) -> None:
    """Give servers that could not renew while no registry ran the time to do so."""
    log = get_logger("services.registry")
    try:
        log.info("leases.taken_over", leases=await leases.prolong(lease_ttl_s))
    except Unavailable as error:
        log.warning("leases.away", reason=error.message)


async def _last_words(history: HistoryWriter) -> None:
    try:
        await history.flush()
    except ShoalError as error:
        get_logger("services.registry").warning("history.lost", waiting=history.waiting, reason=error.message)


def _read_router(text: str) -> registry_pb2.ServiceEndpoint:
    """Read `HOST:PORT=CERTIFICATE.pem`."""
    address, _, path = text.partition("=")
    split_address(address)
    try:
        der = pem_to_der(Path(path).read_bytes())
    except OSError as error:
        raise InvalidRequest(f"cannot read the certificate of router {address}: {path!r} ({error.strerror})") from None
    return registry_pb2.ServiceEndpoint(address=address, certificate=der, tls_name=certificate_name(der))
