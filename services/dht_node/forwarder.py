"""Reads all records of the DHT again and again, and hands them to the registry to adopt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

import grpc.aio

from shoal.dht.directory import SwarmDirectory
from shoal.v1 import common_pb2, registry_pb2, registry_pb2_grpc
from shoal.wire.clock import jitter, new_id
from shoal.wire.errors import ShoalError, Unavailable
from shoal.wire.logs import get_logger
from shoal.wire.membership import Membership
from shoal.wire.records import signed_to_proto
from shoal.wire.status import from_rpc_error

MOST_RECORDS = 500
# Half of what a message may hold: the other half is room for the largest single record.
MOST_BYTES = 512 * 1024
CALL_TIMEOUT_S = 10.0

Adopt = Callable[[Sequence[common_pb2.SignedEnvelope]], Awaitable[registry_pb2.AdoptRecordsResponse]]


class Forwarder:
    """`run` forwards for ever. What the registry makes of the records is logged when it changes."""

    def __init__(self, directory: SwarmDirectory, adopt: Adopt, every_s: float) -> None:
        self._directory = directory
        self._adopt = adopt
        self._every_s = every_s
        self._last: Counter[str] | str = ""
        self._log = get_logger("services.dht_node")

    async def run(self) -> None:
        """Forward after each pause; what does not work now is left for the next time."""
        while True:
            await asyncio.sleep(self._every_s * jitter(0.8, 1.2))
            try:
                counts = await self.forward()
            except ShoalError as error:
                if error.reason != self._last:
                    self._last = error.reason
                    self._log.warning("records.not_forwarded", reason=error.reason, text=error.message)
                continue
            if counts != self._last:
                self._last = counts
                self._log.info("records.forwarded", **counts)

    async def forward(self) -> Counter[str]:
        """Hand over every record that is in the DHT now; return how many had which outcome.

        Raises:
            ShoalError: if the DHT or the registry cannot be reached, or the registry refuses.
        """
        counts: Counter[str] = Counter()
        for batch in _batches(await self._records()):
            answer = await self._adopt(batch)
            for entry in answer.counts:
                name = registry_pb2.AdoptOutcome.Name(entry.outcome)
                counts[name.removeprefix("ADOPT_OUTCOME_").lower()] += entry.count
        return counts

    async def _records(self) -> list[common_pb2.SignedEnvelope]:
        records = []
        for prefix in await self._directory.prefixes():
            snapshot = await self._directory.snapshot(prefix)
            records += [signed_to_proto(snapshot.servers[key].record) for key in sorted(snapshot.servers)]
        return records


def adopting(membership: Callable[[], Membership | None]) -> Adopt:
    """Return what calls AdoptRecords as this member; Unavailable as long as the swarm was not joined."""

    async def adopt(records: Sequence[common_pb2.SignedEnvelope]) -> registry_pb2.AdoptRecordsResponse:
        member = membership()
        if member is None:
            raise Unavailable("the registry was not reached yet")
        stub = registry_pb2_grpc.RegistryServiceStub(member.registry)
        request = registry_pb2.AdoptRecordsRequest(request_id=new_id(), records=records)
        try:
            answer: registry_pb2.AdoptRecordsResponse = await stub.AdoptRecords(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return answer

    return adopt


def _batches(records: Sequence[common_pb2.SignedEnvelope]) -> Iterator[list[common_pb2.SignedEnvelope]]:
    """Cut records into messages: at most `MOST_RECORDS`, and `MOST_BYTES` unless one alone is larger."""
    batch: list[common_pb2.SignedEnvelope] = []
    size = 0
    for record in records:
        record_size = record.ByteSize()
        if batch and (len(batch) == MOST_RECORDS or size + record_size > MOST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += record_size
    if batch:
        yield batch
