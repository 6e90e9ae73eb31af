"""What is written to the log, and what never is (SE-07)."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from services.chassis.logs import configure_logs
from shoal.wire.identity import IdentityKey
from shoal.wire.logs import get_logger
from shoal.wire.tokens import Role, TokenSigner, new_api_key


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    configure_logs("example", "debug", stream)
    yield stream
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def _events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_events_of_services_library_and_others_look_alike(written: io.StringIO) -> None:
    structlog.get_logger("services.example").info("lease.renewed", server_id="s1", ttl_s=15)
    get_logger("shoal.example").warning("swarm.refresh_failed", reason="TimedOut", name="a name")
    logging.getLogger("other").error("plain %s", "text")
    own, library, other = _events(written)
    assert (own["event"], own["server_id"], own["ttl_s"], own["level"]) == ("lease.renewed", "s1", 15, "info")
    assert (library["event"], library["reason"], library["level"]) == ("swarm.refresh_failed", "TimedOut", "warning")
    assert library["name"] == "a name"
    assert (other["event"], other["level"]) == ("plain text", "error")
    assert {event["service"] for event in (own, library, other)} == {"example"}
    assert all("timestamp" in event for event in (own, library, other))


def test_exceptions_keep_their_trace(written: io.StringIO) -> None:
    error = RuntimeError("what happened")
    get_logger("shoal.example").error("rpc.failed", exc_info=error)
    (event,) = _events(written)
    assert "RuntimeError: what happened" in event["exception"]


def test_credentials_are_hidden_wherever_they_slip_in(written: io.StringIO) -> None:
    api_key, hub_token = new_api_key(), "hf_" + "aBc123" * 5
    token = TokenSigner(IdentityKey.generate(), "swarm").issue("alice", Role.USER, 60, 1e9)
    log = structlog.get_logger("services.example")
    log.info("a", access_token=token, api_key="short", authorization="x", password="hunter2", push_key=b"hunter2")
    log.info("b", text=f"Bearer {token}", nested={"deep": [f"ApiKey {api_key}"], "secret": "hunter2"})
    log.info(f"c {api_key} postgresql://user:hunter2@host/db")
    logging.getLogger("other").error("failed with %s and %s", token, api_key)
    logging.getLogger("httpx2").info("GET https://storage/file?Signature=hunter2")
    log.info(f"e {hub_token}")
    log.error("d", exc_info=RuntimeError(f"connecting to redis://:hunter2@host:1 with {token}"))
    text = written.getvalue()
    assert len(_events(written)) == 6
    for secret in (hub_token, token, token.split(".")[2], api_key, "hunter2", "short"):
        assert secret not in text


def test_level_is_respected(written: io.StringIO) -> None:
    logging.getLogger().setLevel("WARNING")
    get_logger("shoal.example").info("quiet")
    structlog.get_logger("services.example").info("quiet")
    assert written.getvalue() == ""


def test_library_alone_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("shoal.silent").info("swarm.refreshed", percent="100%")
    assert capsys.readouterr().out == ""
