"""Settings from flags and environment, and how problems are told."""

from __future__ import annotations

import pytest
from pydantic import Field, SecretStr, ValidationError

from services.chassis.settings import ServiceSettings, parse_settings, service_config


class Example(ServiceSettings):
    """Settings of a service that does not exist."""

    model_config = service_config("EXAMPLE")

    database_url: SecretStr = Field(default=SecretStr("postgresql://u:hunter2@h/d"), description="where data is")
    sessions: int = Field(default=8, ge=1, description="most sessions")
    routers: list[str] = Field(default=[], description="routers")


def test_flag_beats_variable_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_settings(Example, []).sessions == 8
    monkeypatch.setenv("SHOAL_EXAMPLE_SESSIONS", "9")
    assert parse_settings(Example, []).sessions == 9
    assert parse_settings(Example, ["--sessions", "10", "--exit-with-parent"]).sessions == 10


def test_lists_and_switches() -> None:
    settings = parse_settings(Example, ["--routers", "a", "--routers", "b", "--exit-with-parent"])
    assert settings.routers == ["a", "b"]
    assert settings.exit_with_parent


def test_settings_are_frozen_and_secrets_masked() -> None:
    settings = parse_settings(Example, [])
    assert "hunter2" not in repr(settings)
    with pytest.raises(ValidationError):
        settings.sessions = 3


def test_help_shows_defaults_but_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(Example, ["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert "python -m services.example" in shown
    assert "127.0.0.1:0" in shown
    assert "--stop-grace-s" in shown
    assert "default: 8" in shown
    assert "hunter2" not in shown


def test_all_problems_are_told_together_without_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_EXAMPLE_SESSIONS", "canary-value")
    with pytest.raises(SystemExit) as caught:
        parse_settings(Example, ["--listen", "nonsense", "--stop-grace-s=-1"])
    told = capsys.readouterr().err
    assert caught.value.code == 2
    assert "3 wrong setting(s)" in told
    assert "--sessions (or SHOAL_EXAMPLE_SESSIONS)" in told
    assert "--listen" in told
    assert "--stop-grace-s" in told
    assert "canary-value" not in told
