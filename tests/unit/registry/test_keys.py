"""API keys: the bootstrap file, checking, and working on without the database."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.registry.keys import FRESH_S, KeyRing, read_keys_file
from services.registry.store_archive import KeyOwner, MemoryArchive
from shoal.wire.errors import InvalidRequest, NotAuthenticated, Unavailable
from shoal.wire.tokens import Role, api_key_digest, new_api_key


class FlakyArchive(MemoryArchive):
    """An archive that counts questions and can be out of reach."""

    away = False
    silent = False
    asked = 0

    async def find_key(self, digest: str) -> KeyOwner | None:
        self.asked += 1
        if self.away:
            raise Unavailable("away")
        if self.silent:
            await asyncio.Event().wait()
        return await super().find_key(digest)


async def test_a_known_key_gives_its_account_and_role_and_is_asked_for_once() -> None:
    archive, key = FlakyArchive(), new_api_key()
    await archive.add_keys({api_key_digest(key): KeyOwner("ann", Role.OPERATOR)})
    ring = KeyRing(archive, "swarm")
    claims = [await ring.check(key) for _ in range(3)]
    assert {(claim.account, claim.role, claim.swarm_id) for claim in claims} == {("ann", Role.OPERATOR, "swarm")}
    assert archive.asked == 1


async def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(NotAuthenticated, match="ask its operator"):
        await KeyRing(MemoryArchive(), "swarm").check(new_api_key())


async def test_known_keys_outlive_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    archive, key = FlakyArchive(), new_api_key()
    await archive.add_keys({api_key_digest(key): KeyOwner("ann", Role.USER)})
    ring = KeyRing(archive, "swarm")
    await ring.check(key)
    archive.away = True
    monkeypatch.setattr("services.registry.keys.FRESH_S", -FRESH_S)
    assert (await ring.check(key)).account == "ann"
    assert archive.asked == 2
    with pytest.raises(Unavailable):
        await ring.check(new_api_key())
    archive.away, archive.silent = False, True
    monkeypatch.setattr("services.registry.keys.PATIENCE_S", 0.05)
    assert (await ring.check(key)).account == "ann"


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o600)
    return path


def test_the_bootstrap_file_becomes_digests(tmp_path: Path) -> None:
    entries = [{"key": "k1", "account": "ann", "role": "user"}, {"key": "k2", "account": "box", "role": "server"}]
    owners = read_keys_file(write(tmp_path / "keys.json", json.dumps(entries)))
    assert owners == {
        api_key_digest("k1"): KeyOwner("ann", Role.USER),
        api_key_digest("k2"): KeyOwner("box", Role.SERVER),
    }


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[1]",
        '[{"key": "SECRET"}]',
        '[{"key": "SECRET", "account": 3, "role": "user"}]',
        '[{"key": "SECRET", "account": "ann", "role": "king"}]',
    ],
)
def test_a_wrong_file_is_refused_without_its_keys(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "keys.json", content)
    with pytest.raises(InvalidRequest, match=r"keys\.json") as caught:
        read_keys_file(path)
    assert "SECRET" not in str(caught.value)


def test_a_missing_or_open_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no API keys file"):
        read_keys_file(tmp_path / "none.json")
    path = write(tmp_path / "keys.json", "[]")
    path.chmod(0o604)
    with pytest.raises(InvalidRequest, match="chmod"):
        read_keys_file(path)
