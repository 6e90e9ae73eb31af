"""API keys: reading the bootstrap file, and turning a key into the claims of its account.

Only digests are stored and kept. An answer of the database stays good for a while when the database is away.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from services.registry.store_archive import Archive, KeyOwner
from shoal.wire.errors import InvalidRequest, NotAuthenticated, Unavailable
from shoal.wire.private_files import read_private
from shoal.wire.tokens import Claims, Role, api_key_digest

FRESH_S = 60.0
# The owner of a key that is known waits no longer for the database: a token must come before the caller gives up.
PATIENCE_S = 2.0
MOST_KNOWN = 10_000


class KeyRing:
    """Checks API keys of one swarm."""

    def __init__(self, archive: Archive, swarm_id: str) -> None:
        self._archive = archive
        self._swarm_id = swarm_id
        self._known: dict[str, tuple[KeyOwner, float]] = {}

    async def check(self, api_key: str) -> Claims:
        """Return the account and role of an API key.

        Raises:
            NotAuthenticated: if the key is not known.
            Unavailable: if the database does not answer and the key was not seen before.
        """
        digest = api_key_digest(api_key)
        owner = await self._owner(digest)
        if owner is None:
            raise NotAuthenticated("the API key is not known to this swarm; ask its operator for one")
        return Claims(owner.account, owner.role, self._swarm_id, 0.0)

    async def _owner(self, digest: str) -> KeyOwner | None:
        known, asked_at = self._known.get(digest, (None, 0.0))
        if known and time.monotonic() - asked_at < FRESH_S:
            return known
        try:
            async with asyncio.timeout(None if known is None else PATIENCE_S):
                found = await self._archive.find_key(digest)
        except (Unavailable, TimeoutError):
            if known is None:
                raise
            return known
        self._known.pop(digest, None)
        if found:
            while len(self._known) >= MOST_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[digest] = (found, time.monotonic())
        return found


def read_keys_file(path: Path) -> dict[str, KeyOwner]:
    """Read a bootstrap file, a JSON list of `{"key": ..., "account": ..., "role": ...}`; return owners by digest.

    Raises:
        InvalidRequest: if it is missing, malformed or readable by others; no key is repeated in the message.
    """
    try:
        entries = json.loads(read_private(path))
    except FileNotFoundError:
        raise InvalidRequest(f"there is no API keys file at {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InvalidRequest(f"{path} is not JSON") from None
    if not isinstance(entries, list):
        raise InvalidRequest(f"{path} must hold a JSON list")
    return dict(_read_entry(entry, f"entry {number} of {path}") for number, entry in enumerate(entries))


def _read_entry(entry: Any, where: str) -> tuple[str, KeyOwner]:
    values = entry if isinstance(entry, dict) else {}
    key, account, role = (values.get(name) for name in ("key", "account", "role"))
    if not all(isinstance(value, str) and value for value in (key, account, role)):
        raise InvalidRequest(f'{where} must be {{"key": ..., "account": ..., "role": ...}} with texts')
    if role not in list(Role):
        raise InvalidRequest(f"{where} has role {role!r}; roles are {', '.join(Role)}")
    return api_key_digest(str(key)), KeyOwner(str(account), Role(role))
