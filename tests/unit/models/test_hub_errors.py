"""The words for what goes wrong between this machine and the hub, and how long a failure is waited out."""

from __future__ import annotations

import errno
import threading

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import httpx

from shoal.models import hub_errors
from shoal.models.hub_errors import Patience, Place, is_transient, translate
from shoal.wire.errors import Exhausted, NotPermitted, ShoalError, Unavailable

PLACE = Place("owner/tiny", "main", "https://hub.example", "/cache", with_token=False)


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.ENOSPC, Exhausted, "no room for a.safetensors of owner/tiny in /cache (ENOSPC); free some or pass"),
        (errno.EROFS, NotPermitted, "cannot write a.safetensors of owner/tiny to /cache (EROFS); make it writable or"),
        (errno.EACCES, NotPermitted, "make it writable or pass --cache-dir"),
        (errno.ENOLCK, Unavailable, "/cache cannot lock files (ENOLCK); pass a --cache-dir on a local disk"),
        (errno.EIO, Unavailable, "cannot store a.safetensors of owner/tiny in /cache (EIO"),
    ],
)
def test_ml17_what_the_disk_refuses_is_said(number: int, kind: type[ShoalError], text: str) -> None:
    found = translate(OSError(number, "no"), PLACE, "a.safetensors")
    assert type(found) is kind
    assert text in found.message


def test_the_cause_counts_where_the_hub_client_hides_it() -> None:
    hidden = LocalEntryNotFoundError("look at the cause")
    hidden.__cause__ = OfflineModeIsEnabled("offline")
    assert "HF_HUB_OFFLINE forbids" in translate(hidden, PLACE, "a").message


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (httpx.ConnectError("refused"), True),
        (httpx.ReadTimeout("slow"), True),
        (httpx.RemoteProtocolError("cut"), True),
        (httpx.ProxyError("no proxy"), False),
        (httpx.UnsupportedProtocol("ftp"), False),
        (OfflineModeIsEnabled("offline"), False),
        (OSError(errno.ENOSPC, "full"), False),
    ],
)
def test_only_what_may_pass_is_waited_out(error: Exception, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_errors, "backoff_s", lambda *_: 0.0)
    assert is_transient(error) is passes
    patience = Patience(threading.Event(), attempts=3)
    if passes:
        patience.wait(error)
        patience.wait(error)
        patience.progress()
        patience.wait(error)
        patience.wait(error)
    with pytest.raises(type(error)):
        patience.wait(error)


def test_patience_ends_after_a_time_without_progress() -> None:
    patience = Patience(threading.Event(), attempts=100, quiet_s=0.0)
    with pytest.raises(httpx.ConnectError):
        patience.wait(httpx.ConnectError("refused"))


def test_a_stop_ends_the_pause() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Unavailable, match="stopped"):
        Patience(stop).wait(httpx.ConnectError("refused"))
