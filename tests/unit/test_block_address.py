"""NW-09, NW-14: which address a server announces, and that many at once share no port."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from services.block_server.address import announced_address, own_host
from services.block_server.service import SERVICE, policy
from services.chassis.auth import AuthInterceptor
from services.chassis.server import Mount, build_server
from services.registry.reach import Reach
from shoal.v1.block_server_pb2_grpc import add_BlockServerServiceServicer_to_server
from shoal.wire.errors import InvalidRequest
from shoal.wire.identity import IdentityKey
from shoal.wire.swarm_url import split_address
from shoal.wire.tls import make_certificate
from shoal.wire.tokens import KeySet
from tests.support.records import make_signed_server

MANY = 20


def test_nw09_an_address_that_was_told_counts() -> None:
    assert announced_address("gpu1.lab:7000", "10.0.0.2", 45000) == "gpu1.lab:7000"
    assert announced_address("", "10.0.0.2", 45000) == "10.0.0.2:45000"
    assert announced_address("", "fd00::2", 45000) == "[fd00::2]:45000"


@pytest.mark.parametrize("listen", ["192.0.2.7:0", "box.lab:7000", "127.0.0.1:0"])
def test_nw09_a_server_that_listens_at_one_address_announces_it(listen: str) -> None:
    assert own_host(listen, "127.0.0.1:1") == split_address(listen)[0]


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:7000"])
def test_nw09_every_address_becomes_the_one_by_which_the_registry_is_called(listen: str) -> None:
    assert own_host(listen, "127.0.0.1:1") == "127.0.0.1"


def test_nw09_without_a_way_to_the_registry_the_address_must_be_told() -> None:
    with pytest.raises(InvalidRequest, match="--advertise HOST:PORT"):
        own_host("0.0.0.0:0", "no-such-host.invalid:1")


async def test_nw14_many_servers_at_once_have_ports_of_their_own_and_answer_there() -> None:
    identities = [IdentityKey.generate().server_id for _ in range(MANY)]
    certificates = [make_certificate(server_id) for server_id in identities]
    servicer: Any = SimpleNamespace(GetServerInfo=None, Infer=None, Push=None)
    mount = Mount(SERVICE, partial(add_BlockServerServiceServicer_to_server, servicer))
    auth = AuthInterceptor(policy(), lambda: KeySet({}))
    servers = [build_server([mount], "127.0.0.1:0", certificate, auth) for certificate in certificates]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        assert len({server.port for server in servers}) == MANY
        reach = Reach(timeout_s=30.0)
        for server, certificate in zip(servers, certificates, strict=True):
            record = make_signed_server(address=announced_address("", "127.0.0.1", server.port))
            await reach.check(replace(record, certificate=certificate.der))
    finally:
        await asyncio.gather(*(server.stop(0) for server in servers))
