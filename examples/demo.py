"""Real tokens through three local block servers, compared with plain transformers on the same weights.

Sets up a swarm in a temporary folder, asks it, generates the same locally, and takes everything down. The last line
is JSON with the ids of both. Ends with 1 if they differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from services.up.command import Interrupted, Progressing, interruptible
from services.up.layout import DataFolder
from services.up.plan import Options
from services.up.small_model import NAME, ensure_small_model
from services.up.swarm import Swarm
from shoal.cli.generate import Sampling, TextGrower, describe_route, encode_prompt, load_tokenizer, stream_ids
from shoal.wire.errors import ShoalError

SERVERS = 3
INTERRUPTED = 130


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


@contextmanager
def swarm(model: Path) -> Iterator[Swarm]:
    """Run what `shoal up` runs, in a temporary folder, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as folder, ExitStack() as stack:
        options = Options(model, SERVERS, threads=1)
        with Progressing() as progress:
            running = stack.enter_context(Swarm(options, DataFolder(Path(folder)), progress))
            running.start()
        yield running


def ask_swarm(running: Swarm, tokenizer: Any, prompt_ids: list[int], tokens: int) -> list[int]:
    """Print the swarm's answer token by token, its route and speed; return its ids."""
    from shoal import AutoDistributedModelForCausalLM

    model, url = running.options.model, str(running.url)
    remote = AutoDistributedModelForCausalLM.from_pretrained(model, swarm=url, api_key=running.keys.user)
    try:
        ids: list[int] = []
        grower = TextGrower(tokenizer)
        start = time.monotonic()
        for token in stream_ids(remote, prompt_ids, tokens, Sampling()):
            ids.append(token)
            print(grower.add(token), end="", flush=True)
        seconds = time.monotonic() - start
        route = describe_route(remote.connection.last_route)
    finally:
        remote.connection.close()
    say(f"\n\nroute: {' -> '.join('{server} [{span}]'.format(**hop) for hop in route)}")
    say(f"{len(ids)} tokens, {len(ids) / seconds:.1f} tokens/s")
    return ids


def ask_locally(model: Path, prompt_ids: list[int], tokens: int) -> list[int]:
    """Return what plain transformers generates, greedily, from the same weights."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    local = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32, local_files_only=True)
    inputs = torch.tensor([prompt_ids])
    options = {"max_new_tokens": tokens, **Sampling().options()}
    output = local.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    new_ids: list[int] = output[0, len(prompt_ids) :].tolist()
    return new_ids


def demonstrate(prompt: str, tokens: int) -> int:
    """Ask the swarm and plain transformers the same; return 0 if their ids are equal."""
    say(f"preparing {NAME}: fetched and converted the first time")
    model = ensure_small_model()
    tokenizer = load_tokenizer(model)
    prompt_ids = encode_prompt(tokenizer, prompt)
    with swarm(model) as running:
        say(f"\n> {prompt}\n")
        from_swarm = ask_swarm(running, tokenizer, prompt_ids, tokens)
    locally = ask_locally(model, prompt_ids, tokens)
    same = from_swarm == locally
    say(f"same tokens as plain transformers: {'yes' if same else 'no'}")
    say(json.dumps({"same": same, "swarm_ids": from_swarm, "local_ids": locally}))
    return 0 if same else 1


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompt", default="Why is the sky blue? Answer in one sentence.", help="what to ask")
    parser.add_argument("--tokens", type=int, default=32, help="most new tokens")
    arguments = parser.parse_args()
    if not arguments.prompt or arguments.tokens < 1:
        parser.error("the prompt must not be empty, and --tokens at least 1")
    try:
        with interruptible():
            return demonstrate(arguments.prompt, arguments.tokens)
    except Interrupted:
        return INTERRUPTED
    except ShoalError as error:
        say(f"error: {error.message}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
