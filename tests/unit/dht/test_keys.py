"""Where records lie: few keys for each model, the same in every process, servers spread over them."""

from __future__ import annotations

from collections import Counter

from shoal.dht.keys import BUCKETS, MODELS_KEY, bucket_of, server_key, server_keys
from shoal.wire.identity import server_id_of


def ids(count: int) -> list[str]:
    return [server_id_of(number.to_bytes(32)) for number in range(count)]


def test_a_model_has_a_fixed_number_of_keys_whatever_it_has_of_blocks_and_servers() -> None:
    keys = server_keys("bigscience/bloom")
    assert len(set(keys)) == BUCKETS
    assert {server_key("bigscience/bloom", server_id) for server_id in ids(500)} == set(keys)


def test_servers_spread_evenly() -> None:
    counts = Counter(bucket_of(server_id) for server_id in ids(4000))
    assert set(counts) == set(range(BUCKETS))
    assert max(counts.values()) < 1.25 * 4000 / BUCKETS


def test_the_place_of_a_server_never_changes() -> None:
    """Other versions of the software look for it there."""
    found = [bucket_of(server_id) for server_id in ids(6)]
    assert found == [bucket_of(server_id) for server_id in ids(6)] == [3, 1, 3, 2, 4, 6]
    assert server_key("m", ids(1)[0]) == "shoal-v1.servers.m.3"
    assert MODELS_KEY == "shoal-v1.models"


def test_models_do_not_share_keys() -> None:
    assert not set(server_keys("a")) & set(server_keys("b"))
