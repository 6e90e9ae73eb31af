"""P6: decode through three servers that are far from the client and from each other, over what the delays allow.

Servers announce the address of a relay that delays both ways, so that client and servers alike reach them through it.
The time to compute a token is measured through the same relays without a delay, in turns.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from benchmarks.bench import Bench, Figures, Measurement
from benchmarks.decode import encode_prompt, generate
from benchmarks.fleet import Fleet
from benchmarks.links import DelayLine, delay_line
from benchmarks.stats import median, rounded
from benchmarks.swarms import local_swarm
from shoal import AutoDistributedModelForCausalLM, SequenceManagerConfig
from shoal.swarm.spans import split_evenly

SERVERS = 3
DELAY_S = 0.05
_WARM_UP_TOKENS = 3


def run(bench: Bench) -> Figures:
    """Measure the figure `decode`."""
    folder = bench.small_model()
    torch.set_num_threads(1)
    prompt = encode_prompt(str(folder))
    near, far = list[float](), list[float]()
    with _distant_swarm(bench) as (model, lines):
        for number in range(bench.pick(5, 1)):
            for delay_s, token_s in ((0.0, near), (DELAY_S, far)):
                for line in lines:
                    line.set_delay(delay_s)
                generate(model, prompt, _WARM_UP_TOKENS)
                done = generate(model, prompt, bench.pick(24, 4))
                token_s.append(1 / done.decode_rate)
            bench.say(f"round {number + 1}: {1000 * near[-1]:.0f} ms a token, {1000 * far[-1]:.0f} ms with the delay")
    yield Measurement("decode", *figure(near, far))


def figure(near: list[float], far: list[float]) -> tuple[float, dict[str, Any]]:
    """Return the share of the possible speed, of seconds per token without and with the delay."""
    bound_s = median(near) + (SERVERS + 1) * DELAY_S
    return bound_s / median(far), {
        "token_s": rounded(far, 4),
        "compute_s": rounded(near, 4),
        "bound_s": round(bound_s, 4),
        "ratio_by_round": rounded(
            [(one + (SERVERS + 1) * DELAY_S) / other for one, other in zip(near, far, strict=True)]
        ),
        "one_way_delay_s": DELAY_S,
        "servers": SERVERS,
    }


@contextmanager
def _distant_swarm(bench: Bench) -> Iterator[tuple[Any, list[DelayLine]]]:
    """Run servers behind relays; yield a client's model and the relays."""
    folder = bench.small_model()
    bench.say(f"starting {SERVERS} servers behind relays")
    with ExitStack() as stack:
        access = stack.enter_context(local_swarm(bench, folder, 1))
        fleet = stack.enter_context(Fleet(bench, folder, access))
        whole = fleet.online_ids()
        names, lines = list[str](), list[DelayLine]()
        for number, span in enumerate(split_evenly(fleet.num_blocks(), SERVERS)):
            listen = f"127.0.0.1:{_free_port()}"
            line = stack.enter_context(delay_line(listen))
            lines.append(line)
            names.append(fleet.start(str(span), f"far-{number}", "--listen", listen, "--announce", line.address))
        fleet.wait_online(names)
        config = SequenceManagerConfig(blocked_servers=tuple(whole.values()))
        model = AutoDistributedModelForCausalLM.from_pretrained(
            str(folder), swarm=access.url, api_key=access.api_key, config=config
        )
        stack.enter_context(closing(model.connection))
        model.generation_config.eos_token_id = None
        yield model, lines


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
