"""The link between client and server misbehaves; whatever happens, ids are right and nothing is left behind.

Each case prints its seed; `SHOAL_CHAOS_SEED=N` repeats it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.client.config import SequenceManagerConfig
from shoal.client.routes import SnapshotRoutes
from shoal.swarm.snapshot import SwarmSnapshot
from shoal.wire.errors import ShoalError
from tests.support.fake_server import FakeSwarm
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.tiny_models import make_tiny
from tests.support.waiting import wait_until

SEEDS = [int(seed) for seed in os.environ.get("SHOAL_CHAOS_SEED", "1 2 3 4 5 6 7 8").split()]
TOKENS = 20
CONFIG = SequenceManagerConfig(
    step_timeout_s=1.0,
    connect_timeout_s=1.0,
    open_timeout_s=30.0,
    recovery_timeout_s=30.0,
    min_backoff_s=0.01,
    ban_timeout_s=0.1,
)


class ProxiedSwarm:
    """Scripted servers, the second one doubled; every one is reached through a proxy of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.swarm = stack.enter_context(FakeSwarm(folder, "0:3", "3:6", "3:6", config=CONFIG))
        self.proxies = [stack.enter_context(FaultProxy(record.address)) for record in self.swarm.records]
        records = [
            replace(record, address=proxy.address)
            for record, proxy in zip(self.swarm.records, self.proxies, strict=True)
        ]
        self.swarm.connection._routes = SnapshotRoutes(SwarmSnapshot.of(records))

    def check(self, generator: random.Random) -> None:
        """Generate, and compare with the reference; then nothing is open any more."""
        prompt = torch.tensor([[generator.randrange(4, 90) for _ in range(generator.randrange(3, 12))]])
        options = {"max_new_tokens": TOKENS, "do_sample": False}
        wanted = self.swarm.reference.generate(prompt, **options).tolist()
        assert self.swarm.model.generate(prompt, **options).tolist() == wanted
        for proxy in self.proxies:
            proxy.set_fault()
        for proxy in self.proxies:
            proxy.cut_all()
        assert wait_until(lambda: self.swarm.open_sessions == 0)


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[ProxiedSwarm]:
    with ExitStack() as stack:
        yield ProxiedSwarm(make_tiny(tmp_path / "tiny-llama"), stack)


def draw(generator: random.Random, kind: str) -> Fault:
    # A step of one token is a few hundred bytes on the wire, the whole generation some tens of thousands.
    after = generator.randrange(3000, 12000)
    direction = generator.choice([{"up": False}, {"down": False}, {}])
    fields = {
        "cut": {"cut_after": after},
        "black hole": {"swallow_after": after},
        "half close": {"half_close_after": after},
        "delay": {"delay_s": generator.uniform(0.001, 0.02)},
        "throttle": {"bytes_per_s": generator.randrange(50_000, 200_000)},
    }[kind]
    return replace(Fault(), **direction, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["cut", "black hole", "half close", "delay", "throttle"])
def test_a_fault_on_one_link_changes_no_token(proxied: ProxiedSwarm, kind: str, seed: int) -> None:
    print(f"SHOAL_CHAOS_SEED={seed}")
    generator = random.Random(f"{kind} {seed}")
    generator.choice(proxied.proxies).set_fault(draw(generator, kind))
    proxied.check(generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_on_all_links_end_in_the_right_ids_or_a_typed_error(proxied: ProxiedSwarm, seed: int) -> None:
    print(f"SHOAL_CHAOS_SEED={seed}")
    generator = random.Random(f"all {seed}")
    for proxy in proxied.proxies:
        proxy.set_fault(draw(generator, generator.choice(["cut", "half close", "delay", "throttle"])))
    prompt = torch.tensor([[5, 17, 3]])
    wanted = proxied.swarm.reference.generate(prompt, max_new_tokens=TOKENS, do_sample=False).tolist()
    config = replace(CONFIG, recovery_timeout_s=3.0, open_timeout_s=3.0)
    proxied.swarm.connection.config = config
    try:
        given = proxied.swarm.model.generate(prompt, max_new_tokens=TOKENS, do_sample=False).tolist()
    except ShoalError as error:
        print(f"ended with {error.reason}: {error}")
    else:
        assert given == wanted
    for proxy in proxied.proxies:
        proxy.set_fault()
        proxy.cut_all()
    assert wait_until(lambda: proxied.swarm.open_sessions == 0)
    # The same client works again once the links do.
    proxied.check(generator)
