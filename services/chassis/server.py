"""The gRPC server of a service: TLS, errors, authorisation, health and reflection, on one port.

Promises that every RPC of a mounted service has a policy, or the server is not built. Owns the port from
`build_server` until `stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from services.chassis.auth import HEALTH_SERVICE, AuthInterceptor
from services.chassis.errors import ErrorInterceptor
from shoal.wire.channels import Keepalive, server_options
from shoal.wire.errors import PreconditionFailed
from shoal.wire.swarm_url import join_address, split_address
from shoal.wire.tls import Certificate, server_credentials


@dataclass(frozen=True, slots=True)
class Mount:
    """A gRPC service to serve: its full name, and what adds its servicer to a server."""

    service: str
    add_to: Callable[[grpc.aio.Server], None]


@dataclass(slots=True)
class ServiceServer:
    """A server that is bound to `address` (`HOST:PORT`, the real port) and answers after `start`."""

    server: grpc.aio.Server
    address: str
    port: int
    services: tuple[str, ...]
    _health: health_aio.HealthServicer
    _stopped: bool = field(default=False)
    _started: bool = field(default=False)

    async def start(self) -> None:
        """Answer calls, and report SERVING for each service. May be called again."""
        if self._started:
            return
        self._started = True
        await self.server.start()
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        """Report to health checks whether the services can do their work."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for service in ("", *self.services):
            await self._health.set(service, status)

    async def report(self, part: str, works: bool) -> None:
        """Report to health checks, under the name of a part such as a store, whether it can be used."""
        statuses = health_pb2.HealthCheckResponse
        await self._health.set(part, statuses.SERVING if works else statuses.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give open ones `grace_s` to end, then cancel them. May be called again."""
        if not self._stopped:
            self._stopped = True
            await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def build_server(
    mounts: Sequence[Mount],
    listen: str,
    certificate: Certificate,
    auth: AuthInterceptor,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    keepalive: Keepalive | None = None,
) -> ServiceServer:
    """Build a server and bind it to `HOST:PORT`.

    `interceptors` run inside errors and authorisation, in order.

    Raises:
        PreconditionFailed: if the port cannot be bound.
        ValueError: if an RPC has no policy, or a policy no RPC.
    """
    names = tuple(mount.service for mount in mounts)
    check_policy_complete(names, auth)
    server = grpc.aio.server(interceptors=[ErrorInterceptor(), auth, *interceptors], options=server_options(keepalive))
    for mount in mounts:
        mount.add_to(server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((*names, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
    host, _ = split_address(listen)
    try:
        port = server.add_secure_port(listen, server_credentials(certificate))
    except RuntimeError:
        port = 0
    if port == 0:
        raise PreconditionFailed(f"cannot listen on {listen}: is the port taken by another process?")
    return ServiceServer(server, join_address(host, port), port, names, health)


def check_policy_complete(services: Sequence[str], auth: AuthInterceptor) -> None:
    """Compare the policy with the RPCs that the services' protos define.

    Raises:
        ValueError: if they differ. An RPC without policy would be refused to everybody: a mistake, found at
        start.
    """
    pool = descriptor_pool.Default()
    methods = {
        f"/{service}/{method.name}" for service in services for method in pool.FindServiceByName(service).methods
    }
    if missing := methods - set(auth.policy):
        raise ValueError(f"no policy for {', '.join(sorted(missing))}")
    if unknown := set(auth.policy) - methods:
        raise ValueError(f"policy for methods that do not exist: {', '.join(sorted(unknown))}")
