"""Builds the DHT node from its settings and runs it; the only place that puts its parts together."""

from __future__ import annotations

import asyncio
import math
import sys

from services.chassis.errors import expected_error
from services.chassis.logs import configure_logs
from services.chassis.loops import StopSignal, run_service
from services.chassis.ready import remove_ready, write_ready
from services.dht_node.forwarder import Forwarder, adopting
from services.dht_node.settings import DhtNodeSettings
from shoal.dht.book import RecordBook
from shoal.dht.directory import SwarmDirectory
from shoal.dht.identity import load_or_create_identity
from shoal.dht.link import DhtLink, LinkOptions
from shoal.dht.node import NodeOptions
from shoal.wire.errors import Unavailable
from shoal.wire.logs import get_logger
from shoal.wire.membership import Membership
from shoal.wire.swarm_url import SwarmUrl, resolve_swarm
from shoal.wire.tokens import KeySet

START_TIMEOUT_S = 60.0


def run(settings: DhtNodeSettings) -> int:
    """Run the node until it is told to stop; return the exit status, 1 after a start that failed."""
    configure_logs("dht_node", settings.log_level)
    try:
        run_service(lambda stop: serve(settings, stop), settings)
    except Exception as error:  # the process ends here, with one clear line where the reason is known
        reason = expected_error(error)
        if reason is None:
            raise
        sys.stderr.write(f"error: {reason.message}\n")
        return 1
    return 0


async def serve(settings: DhtNodeSettings, stop: StopSignal) -> None:
    """Be a node until `stop`; forward records once the registry was reached, however late.

    Raises:
        BaseExceptionGroup: with the ShoalError if the node does not start, or swarm and key are missing or refused.
    """
    secret = settings.api_key.get_secret_value() if settings.api_key else None
    swarm = resolve_swarm(settings.swarm or None, secret) if settings.forward else None
    member = _Member()
    link = _link(settings, RecordBook(member.key_set))
    remove_ready(settings.ready_file)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(link.run(), name="link")]
            if swarm is not None:
                tasks.append(group.create_task(_forward(settings, swarm, member, SwarmDirectory(link)), name="forward"))
            ready = group.create_task(_tell_ready(settings, link), name="ready")
            await stop.wait()
            for task in (*tasks, ready):
                task.cancel()
    finally:
        remove_ready(settings.ready_file)


class _Member:
    """The membership, once there is one."""

    def __init__(self) -> None:
        self.membership: Membership | None = None

    def key_set(self) -> KeySet | None:
        """Return the swarm's keys if they are known."""
        return self.membership.key_set if self.membership else None


def _link(settings: DhtNodeSettings, book: RecordBook) -> DhtLink:
    identity, _ = load_or_create_identity(settings.state_dir)
    node = NodeOptions(
        initial_peers=tuple(settings.initial_peers),
        listen=settings.listen,
        advertise=settings.advertise,
        identity=identity,
    )
    return DhtLink(LinkOptions(node, memory=settings.state_dir / "dht_peers.json", may_be_alone=True), book)


async def _forward(
    settings: DhtNodeSettings, swarm: tuple[SwarmUrl, str], member: _Member, directory: SwarmDirectory
) -> None:
    url, api_key = swarm
    memory = settings.state_dir / "membership.json"
    async with await Membership.join(url, api_key, wait_s=math.inf, memory=memory) as membership:
        member.membership = membership
        forwarder = Forwarder(directory, adopting(lambda: member.membership), settings.forward_every_s)
        async with asyncio.TaskGroup() as group:
            group.create_task(membership.run(), name="membership")
            group.create_task(forwarder.run(), name="forwarder")


async def _tell_ready(settings: DhtNodeSettings, link: DhtLink) -> None:
    node = await link.node(START_TIMEOUT_S)
    if not node.addresses:
        raise Unavailable("the node has no address that others could reach")
    get_logger("services.dht_node").info("dht_node.ready", peers=list(node.addresses))
    write_ready(settings.ready_file, settings.advertise or settings.listen, node.addresses)
