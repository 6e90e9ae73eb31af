"""Under which keys things lie in the DHT. Pure.

A record lies under its model's prefix in one of a few buckets, chosen by the server's id: reading a model takes
`BUCKETS` keys, however many blocks and servers it has, and no key collects all servers of a large swarm.
"""

from __future__ import annotations

import hashlib

BUCKETS = 8
# Models that have servers: one entry for each prefix, a record of one of its servers.
MODELS_KEY = "shoal-v1.models"


def bucket_of(server_id: str) -> int:
    """Return the bucket of a server, the same in every process."""
    return int.from_bytes(hashlib.sha256(server_id.encode()).digest()[:8]) % BUCKETS


def server_key(prefix: str, server_id: str) -> str:
    """Return the key of a server's record."""
    return bucket_key(prefix, bucket_of(server_id))


def server_keys(prefix: str) -> tuple[str, ...]:
    """Return the keys that together hold all records of a prefix."""
    return tuple(bucket_key(prefix, bucket) for bucket in range(BUCKETS))


def bucket_key(prefix: str, bucket: int) -> str:
    """Return the key of one bucket."""
    return f"shoal-v1.servers.{prefix}.{bucket}"
