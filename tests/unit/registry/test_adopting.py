"""Records that others found in the DHT: which get a lease, and what is said of the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from services.registry.adopt import MOST_RECORDS, Adopter
from shoal.swarm.snapshot import ServerState
from shoal.v1 import common_pb2, registry_pb2, swarm_pb2
from shoal.wire.clock import now_s, to_timestamp
from shoal.wire.errors import InvalidRequest, NotPermitted
from shoal.wire.identity import IdentityKey
from shoal.wire.records import sign_record
from shoal.wire.tokens import TokenSigner
from tests.support.records import make_record
from tests.unit.registry.test_announcing import TTL_S, Registry, record

Envelope = common_pb2.SignedEnvelope


class Adopting(Registry):
    """The registry's parts, and what adopts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adopter = Adopter(self.parts)

    def enrolled(self, key: IdentityKey, sequence: int = 1, life_s: float = 60.0, **changes: Any) -> Envelope:
        now = now_s()
        fields: dict[str, Any] = {
            "enrolment": self.signer.enrol("ann", key.server_id, 600, now),
            "expires_at": to_timestamp(now + life_s),
            "sequence": sequence,
        }
        return sign_record(key, make_record(key, **(fields | changes)))

    async def outcomes(self, *envelopes: Envelope) -> dict[str, int]:
        counts, _ = await self.adopter.adopt(envelopes)
        names = {registry_pb2.AdoptOutcome.Name(outcome): count for outcome, count in counts.items()}
        return {name.removeprefix("ADOPT_OUTCOME_").lower(): count for name, count in names.items()}


@pytest.fixture
async def registry() -> Adopting:
    return Adopting()


@pytest.fixture
def key() -> IdentityKey:
    return IdentityKey.generate()


async def test_an_enrolled_server_gets_a_lease_for_the_account_it_is_enrolled_for(
    registry: Adopting, key: IdentityKey
) -> None:
    counts, revision = await registry.adopter.adopt([registry.enrolled(key)])
    assert counts == Counter({registry_pb2.ADOPT_OUTCOME_ADOPTED: 1})
    assert revision == 1
    assert await registry.shown() == {key.server_id: ServerState.ONLINE}
    await registry.history.flush()
    assert [sighting.account for _, sighting in registry.archive.history.values()] == ["ann"]
    assert await registry.outcomes(registry.enrolled(key)) == {"adopted": 1}, "again changes nothing"


async def test_an_adopted_lease_ends_with_its_record_at_the_latest(registry: Adopting, key: IdentityKey) -> None:
    other = IdentityKey.generate()
    await registry.outcomes(registry.enrolled(key, life_s=4.0), registry.enrolled(other, life_s=60.0))
    registry.time_s += 5.0
    assert set(await registry.shown()) == {other.server_id}
    registry.time_s += TTL_S
    assert await registry.shown() == {}


async def test_the_servers_own_announcement_counts_before_and_after(registry: Adopting, key: IdentityKey) -> None:
    stream = registry.stream()
    await stream.receive(record(key, 3))
    assert await registry.outcomes(registry.enrolled(key, 9, state=swarm_pb2.SERVER_STATE_DRAINING)) == {"held": 1}
    registry.leases.lose_everything()
    assert await registry.outcomes(registry.enrolled(key, 9)) == {"adopted": 1}
    later = registry.stream()
    await later.receive(record(key, 10))
    assert await registry.outcomes(registry.enrolled(key, 11)) == {"held": 1}


def bad(registry: Adopting, key: IdentityKey) -> dict[str, Envelope]:
    now = now_s()
    forged = registry.enrolled(key)
    forged.signature = bytes(64)
    foreign = TokenSigner(IdentityKey.generate(), "swarm").enrol("ann", key.server_id, 600, now)
    ended = registry.enrolled(key, issued_at=to_timestamp(now - 60), life_s=-1.0)
    stranger = IdentityKey.generate()
    return {
        "forged": forged,
        "malformed": registry.enrolled(key, block_hashes=[b"short"]),
        "expired": ended,
        "stranger": registry.enrolled(key, enrolment=foreign),
        "wrong_weights": registry.enrolled(stranger, block_hashes=[b"x" * 32, b"y" * 32]),
    }


@pytest.mark.parametrize("outcome", ["forged", "malformed", "expired", "stranger", "wrong_weights"])
async def test_a_bad_record_is_told_and_hides_no_other(registry: Adopting, key: IdentityKey, outcome: str) -> None:
    good = IdentityKey.generate()
    await registry.outcomes(registry.enrolled(good))
    envelope = bad(registry, key)[outcome]
    assert await registry.outcomes(envelope, registry.enrolled(good, 2), envelope) == {outcome: 2, "adopted": 1}
    assert set(await registry.shown()) == {good.server_id}


async def test_an_older_record_is_a_replay(registry: Adopting, key: IdentityKey) -> None:
    await registry.outcomes(registry.enrolled(key, 9))
    assert await registry.outcomes(registry.enrolled(key, 8)) == {"replayed": 1}


async def test_good_bye_ends_an_adopted_lease_but_not_the_servers_own(registry: Adopting, key: IdentityKey) -> None:
    leaving: Callable[[int], Envelope] = lambda n: registry.enrolled(key, n, state=swarm_pb2.SERVER_STATE_OFFLINE)  # noqa: E731
    await registry.outcomes(registry.enrolled(key))
    assert await registry.shown()
    assert await registry.outcomes(leaving(2)) == {"left": 1}
    assert await registry.shown() == {}
    await registry.stream().receive(record(key, 3))
    assert await registry.outcomes(leaving(4)) == {"left": 1}
    assert await registry.shown()


async def test_without_the_stores_nothing_is_lost_for_good(registry: Adopting, key: IdentityKey) -> None:
    registry.leases.away = True
    assert await registry.outcomes(registry.enrolled(key)) == {"unavailable": 1}
    registry.leases.away = False
    registry.archive.away = True
    unseen = make_record(key, 2, 4)
    envelope = registry.enrolled(key, span=unseen.span, block_hashes=list(unseen.block_hashes))
    assert await registry.outcomes(envelope) == {"unavailable": 1}
    registry.archive.away = False
    assert await registry.outcomes(envelope) == {"adopted": 1}


async def test_too_many_at_once_are_refused(registry: Adopting) -> None:
    with pytest.raises(InvalidRequest, match="1000"):
        await registry.adopter.adopt([Envelope()] * (MOST_RECORDS + 1))
    assert await registry.outcomes(*[Envelope()] * 3) == {"forged": 3}


async def test_nobody_announces_a_copy_of_a_record_from_the_dht(registry: Adopting, key: IdentityKey) -> None:
    await registry.stream("ann").receive(record(key, 3))
    copied = registry.enrolled(key, 7)
    with pytest.raises(NotPermitted, match="another account"):
        await registry.stream("thief").receive(registry_pb2.AnnounceServerRequest(record=copied))
    await registry.stream("ann").receive(registry_pb2.AnnounceServerRequest(record=copied))
