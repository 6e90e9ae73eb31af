"""How the two ends of a gRPC connection are set up, so that their keepalive and size limits fit each other.

A server that keeps grpc's default of five minutes between pings ends every quiet stream of a client that
pings more often, so a client must only be used with servers that were given `server_options()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from shoal.wire.bearer import BearerChannel
from shoal.wire.tls import der_to_pem

MAX_MESSAGE_BYTES = 1 << 20
MAX_STREAMS_PER_CONNECTION = 1000

Options = list[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """When to ping a quiet connection. Both sides must agree: `allowed_every_s` <= `ping_every_s`.

    A peer that does not answer within `timeout_s` is gone; the calls on the connection fail. A client of grpc pings
    once a second at most, whatever it is told.
    """

    ping_every_s: float = 10.0
    timeout_s: float = 5.0
    allowed_every_s: float = 5.0


def open_channel(
    address: str,
    certificate_der: bytes,
    tls_name: str,
    token: Callable[[], str] | None = None,
    keepalive: Keepalive | None = None,
) -> grpc.aio.Channel:
    """Open a channel to `HOST:PORT` that trusts only this certificate (DER) under this name.

    `token`, if given, is called for every RPC and sent as `authorization: Bearer TOKEN`. Nothing is sent before the
    first call; close the channel before its event loop ends.
    """
    credentials = grpc.ssl_channel_credentials(root_certificates=der_to_pem(certificate_der))
    channel = grpc.aio.secure_channel(address, credentials, options=client_options(tls_name, keepalive))
    return channel if token is None else BearerChannel(channel, token)


def client_options(tls_name: str, keepalive: Keepalive | None = None) -> Options:
    """Return the options of a client channel."""
    keepalive = keepalive or Keepalive()
    return [
        ("grpc.ssl_target_name_override", tls_name),
        *_common(keepalive),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        (
            "grpc.max_reconnect_backoff_ms",
            2_000,
        ),  # the default waits minutes for a server that is back long since
        (
            "grpc.enable_http_proxy",
            0,
        ),  # a proxy for the web must not swallow calls to this machine or its neighbours
    ]


def server_options(keepalive: Keepalive | None = None) -> Options:
    """Return the options of a `grpc.aio.server` that fit `open_channel` with the same keepalive."""
    keepalive = keepalive or Keepalive()
    return [
        *_common(keepalive),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(keepalive.allowed_every_s)),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.so_reuseport", 0),  # two servers on one port is a mistake, not load balancing
    ]


def _common(keepalive: Keepalive) -> Options:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", _ms(keepalive.ping_every_s)),
        ("grpc.keepalive_timeout_ms", _ms(keepalive.timeout_s)),
        # grpc 1.85 starts only this timer (60 s unless set), never that of the option above.
        ("grpc.http2.ping_timeout_ms", _ms(keepalive.timeout_s)),
        (
            "grpc.http2.max_pings_without_data",
            0,
        ),  # a session may think for minutes; a dead peer must still be seen
    ]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
