"""One suite for every lease store: memory with a manual clock, and Valkey with its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import pytest

from services.chassis.storage import redis_client
from services.registry.domain.fencing import ADOPTED_STREAM, NEW_STREAM, Claim
from services.registry.domain.picture import Position
from services.registry.store_leases import LeaseStore, MemoryLeases
from services.registry.store_leases_redis import KEY_PREFIX, RedisLeases
from shoal.wire.errors import AlreadyExists, LeaseExpired, NotPermitted, Unavailable

# Started before a test counts what it leaves over.
pytestmark = pytest.mark.usefixtures("redis_server_url")

NOWHERE = Position("", 0)
LONG_S = 60.0


@dataclass
class Bench:
    """A store, a way to let its time pass, and a way to lose its content."""

    store: LeaseStore
    wait: Callable[[float], Awaitable[None]]
    lose_everything: Callable[[], Awaitable[None]]


@pytest.fixture(params=["memory", "valkey"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "memory":
        clock = [1000.0]

        async def wait(seconds: float) -> None:
            clock[0] += seconds

        async def lose() -> None:
            memory.lose_everything()

        memory = MemoryLeases(lambda: clock[0])
        yield Bench(memory, wait, lose)
        return
    async with redis_client(request.getfixturevalue("redis_url")) as client:

        async def flush() -> None:
            await client.flushall()

        yield Bench(RedisLeases(client), asyncio.sleep, flush)


def claim(server_id: str = "a", sequence: int = 1, entry: bytes = b"entry", **changes: object) -> Claim:
    return replace(Claim(server_id, sequence, "owner", NEW_STREAM, entry), **changes)  # type: ignore[arg-type]


async def held(store: LeaseStore) -> dict[str, bytes]:
    reading = await store.read(NOWHERE)
    assert reading.full
    return {lease.server_id: lease.entry for lease in reading.leases}


async def test_a_lease_is_read_with_its_entry_and_end(bench: Bench) -> None:
    grant = await bench.store.put(claim(entry=b"\x00\xff"), LONG_S)
    reading = await bench.store.read(NOWHERE)
    assert [(lease.server_id, lease.entry) for lease in reading.leases] == [("a", b"\x00\xff")]
    assert reading.leases[0].expires_at_s == pytest.approx(grant.expires_at_s)
    assert reading.position == grant.position
    assert reading.position.revision == 1


async def test_only_changes_since_the_known_position_are_read(bench: Bench) -> None:
    first = await bench.store.put(claim("a"), LONG_S)
    second = await bench.store.put(claim("b"), LONG_S)
    await bench.store.put(claim("c"), LONG_S)
    assert await bench.store.remove("c", 0) is False
    reading = await bench.store.read(first.position)
    assert not reading.full
    assert {lease.server_id for lease in reading.leases} == {"b", "c"}
    assert reading.removals == ()
    assert await bench.store.remove("b", second.stream) is True
    after = await bench.store.read(reading.position)
    assert (after.leases, after.removals) == ((), ("b",))
    assert after.position.revision == reading.position.revision + 1
    again = await bench.store.read(after.position)
    assert (again.position, again.leases, again.removals) == (after.position, (), ())


async def test_a_lease_ends_at_its_time_unless_renewed(bench: Bench) -> None:
    brief = await bench.store.put(claim("brief"), 0.2)
    kept = await bench.store.put(claim("kept"), 0.2)
    await bench.store.put(claim("kept", stream=kept.stream), LONG_S)
    known = (await bench.store.read(NOWHERE)).position
    await bench.wait(0.3)
    reading = await bench.store.read(known)
    assert reading.removals == ("brief",)
    assert set(await held(bench.store)) == {"kept"}
    assert reading.position.revision > brief.position.revision


async def test_renewing_a_lease_that_is_gone_grants_it_anew(bench: Bench) -> None:
    grant = await bench.store.put(claim(), 0.1)
    await bench.wait(0.2)
    assert await held(bench.store) == {}
    again = await bench.store.put(claim(stream=grant.stream), LONG_S)
    assert again.stream == grant.stream
    assert set(await held(bench.store)) == {"a"}


async def test_prolonging_saves_leases_whose_time_is_over_and_shortens_none(bench: Bench) -> None:
    await bench.store.put(claim("long"), 2 * LONG_S)
    last = await bench.store.put(claim("over"), 0.1)
    await bench.wait(0.2)
    assert await bench.store.prolong(LONG_S) == 1
    reading = await bench.store.read(last.position)
    assert [lease.server_id for lease in reading.leases] == ["over"]
    assert reading.leases[0].expires_at_s > last.expires_at_s + LONG_S - 1
    assert set(await held(bench.store)) == {"long", "over"}
    again = await bench.store.read(NOWHERE)
    ends = {lease.server_id: lease.expires_at_s for lease in again.leases}
    assert ends["long"] > ends["over"]


async def test_removed_and_granted_again_is_an_upsert_only(bench: Bench) -> None:
    grant = await bench.store.put(claim(), LONG_S)
    await bench.store.remove("a", grant.stream)
    await bench.store.put(claim(entry=b"new"), LONG_S)
    reading = await bench.store.read(grant.position)
    assert [lease.entry for lease in reading.leases] == [b"new"]
    assert reading.removals == ()


async def test_an_older_record_is_refused(bench: Bench) -> None:
    huge = 2**63 + 1
    await bench.store.put(claim(sequence=huge), LONG_S)
    with pytest.raises(LeaseExpired, match="greater sequence"):
        await bench.store.put(claim(sequence=huge - 1), LONG_S)
    assert set(await held(bench.store)) == {"a"}


async def test_the_newest_stream_of_a_server_wins(bench: Bench) -> None:
    old = await bench.store.put(claim(), LONG_S)
    new = await bench.store.put(claim(entry=b"new"), LONG_S)
    assert new.stream > old.stream
    with pytest.raises(AlreadyExists, match="newer stream"):
        await bench.store.put(claim(stream=old.stream), LONG_S)
    assert await bench.store.remove("a", old.stream) is False
    await bench.store.put(claim(stream=new.stream, entry=b"newest"), LONG_S)
    assert await held(bench.store) == {"a": b"newest"}


async def test_a_copied_record_of_another_account_is_refused_and_a_newer_one_wins(bench: Bench) -> None:
    await bench.store.put(claim(sequence=7), LONG_S)
    with pytest.raises(NotPermitted, match="another account"):
        await bench.store.put(claim(sequence=7, account="thief"), LONG_S)
    await bench.store.put(claim(sequence=8, account="new owner"), LONG_S)


async def test_a_refused_claim_changes_nothing(bench: Bench) -> None:
    grant = await bench.store.put(claim(sequence=7), LONG_S)
    with pytest.raises(LeaseExpired):
        await bench.store.put(claim(sequence=6, entry=b"old"), LONG_S)
    reading = await bench.store.read(grant.position)
    assert (reading.position, reading.leases) == (grant.position, ())


async def test_a_store_that_lost_everything_has_a_new_epoch(bench: Bench) -> None:
    grant = await bench.store.put(claim(), LONG_S)
    await bench.lose_everything()
    reading = await bench.store.read(grant.position)
    assert reading.full
    assert reading.position.epoch != grant.position.epoch
    assert reading.leases == ()
    again = await bench.store.put(claim(stream=grant.stream), LONG_S)
    assert again.position == Position(reading.position.epoch, 1)


async def test_concurrent_claims_get_revisions_of_their_own(bench: Bench) -> None:
    grants = await asyncio.gather(*(bench.store.put(claim(f"s{n}"), LONG_S) for n in range(60)))
    assert {grant.position.revision for grant in grants} == set(range(1, 61))
    assert len(await held(bench.store)) == 60


async def test_valkey_that_fell_back_to_an_older_state_gets_a_new_epoch(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        store = RedisLeases(client)
        grant = await store.put(claim(), LONG_S)
        await client.set(KEY_PREFIX + "revision", 0)
        reading = await store.read(grant.position)
        assert reading.full
        assert reading.position.epoch != grant.position.epoch


async def test_valkey_forgets_old_removals_and_then_reads_in_full(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        store = RedisLeases(client)
        start = (await store.put(claim("stays"), LONG_S)).position
        for number in range(1002):
            grant = await store.put(claim(f"s{number}"), LONG_S)
            await store.remove(f"s{number}", grant.stream)
        reading = await store.read(start)
        assert reading.full
        assert [lease.server_id for lease in reading.leases] == ["stays"]
        near = await store.read(Position(start.epoch, reading.position.revision - 1))
        assert (near.full, near.removals) == (False, ("s1001",))


async def test_valkey_works_on_after_its_scripts_vanished(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        store = RedisLeases(client)
        await store.put(claim("a"), LONG_S)
        await client.script_flush()
        await store.put(claim("b"), LONG_S)
        await client.script_flush()
        assert set(await held(store)) == {"a", "b"}


async def test_a_cancelled_call_does_not_mix_up_later_answers(redis_url: str) -> None:
    async with redis_client(redis_url, max_connections=1) as client:
        store = RedisLeases(client)
        for number in range(50):
            task = asyncio.ensure_future(store.put(claim(f"s{number}"), LONG_S))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await client.echo(f"{number}") == f"{number}".encode()


async def test_a_cancelled_call_ends_at_whatever_moment_the_cancellation_comes(redis_url: str) -> None:
    """The client itself drops a cancellation that meets the end of a sending."""
    for turns in range(120):
        async with redis_client(redis_url) as client:
            store = RedisLeases(client)
            if turns % 2:
                await store.read(NOWHERE)  # connected before
            task = asyncio.ensure_future(store.put(claim(f"s{turns}"), LONG_S))
            for _ in range(turns // 4):
                await asyncio.sleep(0)
            finished = task.done()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() is not finished


async def test_valkey_out_of_reach_is_unavailable() -> None:
    async with redis_client("redis://127.0.0.1:1/0") as client:
        with pytest.raises(Unavailable, match="lease store"):
            await RedisLeases(client).read(NOWHERE)


def adopted(**changes: object) -> Claim:
    return claim(**{"adopted": True, "entry": b"adopted", **changes})  # type: ignore[arg-type]


async def test_an_adopted_lease_is_there_until_its_end_or_a_newer_record(bench: Bench) -> None:
    grant = await bench.store.put(adopted(sequence=5), 0.3)
    assert grant.stream == ADOPTED_STREAM
    with pytest.raises(LeaseExpired):
        await bench.store.put(adopted(sequence=4), LONG_S)
    await bench.store.put(adopted(sequence=5), 0.3)
    await bench.store.put(adopted(sequence=6, entry=b"newer"), 0.3)
    assert await held(bench.store) == {"a": b"newer"}
    await bench.wait(0.4)
    assert await held(bench.store) == {}


async def test_a_server_that_holds_its_lease_itself_is_not_adopted(bench: Bench) -> None:
    grant = await bench.store.put(claim(sequence=5), LONG_S)
    with pytest.raises(AlreadyExists, match="itself"):
        await bench.store.put(adopted(sequence=9), LONG_S)
    await bench.store.put(claim(sequence=5, stream=grant.stream, entry=b"renewed"), LONG_S)
    assert await held(bench.store) == {"a": b"renewed"}


async def test_a_server_takes_its_lease_back_from_an_adopted_record(bench: Bench) -> None:
    own = await bench.store.put(claim(sequence=5), LONG_S)
    await bench.lose_everything()
    await bench.store.put(adopted(sequence=9), LONG_S)
    await bench.store.put(claim(sequence=5, stream=own.stream, entry=b"own"), LONG_S)
    assert await held(bench.store) == {"a": b"own"}
    with pytest.raises(AlreadyExists):
        await bench.store.put(adopted(sequence=10), LONG_S)


async def test_a_new_stream_must_be_newer_than_the_adopted_record(bench: Bench) -> None:
    await bench.store.put(adopted(sequence=9), LONG_S)
    with pytest.raises(LeaseExpired):
        await bench.store.put(claim(sequence=8), LONG_S)
    with pytest.raises(NotPermitted):
        await bench.store.put(claim(sequence=9, account="thief"), LONG_S)
    grant = await bench.store.put(claim(sequence=9), LONG_S)
    assert grant.stream > ADOPTED_STREAM


async def test_only_an_adopted_lease_is_removed_as_one(bench: Bench) -> None:
    await bench.store.put(adopted(), LONG_S)
    await bench.store.put(claim("b"), LONG_S)
    assert await bench.store.remove("b", ADOPTED_STREAM) is False
    assert await bench.store.remove("a", ADOPTED_STREAM) is True
    assert set(await held(bench.store)) == {"b"}
