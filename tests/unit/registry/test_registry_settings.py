"""Settings of the registry: lists from flags and environment, and times that fit each other."""

from __future__ import annotations

import pytest

from services.chassis.settings import parse_settings
from services.registry.settings import RegistrySettings

STORES = ["--database-url", "postgresql://u:hush@h:1/n", "--redis-url", "redis://:hush@h:1/0"]


def test_routers_repeat_or_stand_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*STORES, "--routers", "h:1=/a.pem", "--routers", "h:2=/b.pem"]
    assert parse_settings(RegistrySettings, flags).routers == ["h:1=/a.pem", "h:2=/b.pem"]
    monkeypatch.setenv("SHOAL_REGISTRY_ROUTERS", "h:1=/a.pem, h:2=/b.pem")
    assert parse_settings(RegistrySettings, STORES).routers == ["h:1=/a.pem", "h:2=/b.pem"]
    monkeypatch.delenv("SHOAL_REGISTRY_ROUTERS")
    assert parse_settings(RegistrySettings, STORES).routers == []


def test_a_heartbeat_must_fit_twice_into_a_lease(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(RegistrySettings, [*STORES, "--lease-ttl-s", "5", "--heartbeat-s", "3"])
    assert caught.value.code == 2
    assert "at most half of lease_ttl_s" in capsys.readouterr().err


def test_missing_stores_are_named_and_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(RegistrySettings, [])
    told = capsys.readouterr().err
    assert "--database-url" in told
    assert "SHOAL_REGISTRY_REDIS_URL" in told
    assert "hush" not in repr(parse_settings(RegistrySettings, STORES))
