"""`shoal generate`: one answer from the swarm, token by token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.output import emit, notes, write
from shoal.wire.errors import InvalidRequest
from shoal.wire.swarm_url import SwarmFile

if TYPE_CHECKING:
    from shoal.swarm.routing import Route

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 takes the most likely one."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def options(self) -> dict[str, Any]:
        """Return transformers' own options."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": None}


class TextGrower:
    """Turns ids that come one by one into text that only grows: half a character waits for its other half."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """Take one id and return the text that it completes."""
        self._ids.append(token)
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="what to ask")],
    model: Annotated[
        str | None,
        typer.Option(help="model folder or OWNER/NAME of the hub; by default that of the running `shoal up`"),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of the hub's repository")] = None,
    hub_token: Annotated[
        str | None, typer.Option("--hub-token", "--token", help="token of the hub; by default $HF_TOKEN or its login")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="where files of the hub are kept; by default its cache")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="most tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="sample from the likeliest tokens that sum to it")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="seed of the sampling, for the same answer again")] = None,
    swarm: Annotated[
        str | None, typer.Option(help="swarm URL; by default $SHOAL_SWARM, else the file of `shoal up`")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="continue the text instead of asking with the chat template")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object at the end instead of text")] = False,
) -> None:
    """Ask the swarm and print its answer as it comes."""
    if not prompt:
        raise InvalidRequest("the prompt is empty; say what to ask")
    named = model_named(model)
    from shoal import AutoDistributedModelForCausalLM
    from shoal.models.files import fetch_tokenizer

    remote = AutoDistributedModelForCausalLM.from_pretrained(
        named, swarm=swarm, revision=revision, token=hub_token, cache_dir=cache_dir
    )
    try:
        tokenizer = load_tokenizer(fetch_tokenizer(remote.checkpoint.files))
        prompt_ids = encode_prompt(tokenizer, prompt, raw=raw)
        new_ids, grower, text, start = [], TextGrower(tokenizer), "", time.monotonic()
        for token in stream_ids(remote, prompt_ids, max_new_tokens, Sampling(temperature, top_p, seed)):
            new_ids.append(token)
            text += (piece := grower.add(token))
            if not json:
                write(piece)
        seconds = time.monotonic() - start
        route = describe_route(remote.connection.last_route)
    finally:
        remote.connection.close()
    rate = len(new_ids) / seconds
    if json:
        ids = {"prompt_ids": prompt_ids, "new_ids": new_ids}
        emit({"text": text, **ids, "route": route, "seconds": round(seconds, 3), "tokens_per_s": round(rate, 2)})
    else:
        write("\n")
        hops = " -> ".join(f"{hop['server']} [{hop['span']}]" for hop in route)
        notes().print(f"{len(new_ids)} tokens, {rate:.1f} tokens/s, route {hops}", style="dim", markup=False)


def model_named(given: str | None) -> str:
    """Return the model that is meant: the one given, else that of the running `shoal up`.

    Raises:
        InvalidRequest: if none is given and no `shoal up` of this user runs.
    """
    if given is not None:
        return given
    file = SwarmFile.read()
    if file is None or not file.model:
        raise InvalidRequest("no model given: pass --model FOLDER or OWNER/NAME, or start a swarm here with `shoal up`")
    return file.model


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that lies in the model folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def encode_prompt(tokenizer: Any, prompt: str, *, raw: bool = False) -> list[int]:
    """Return the ids of a question in the model's chat format, or of the bare text."""
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"])


def stream_ids(model: Any, prompt_ids: list[int], max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
    """Yield the new ids of one row as they come."""
    import torch

    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    options = {"max_new_tokens": max_new_tokens, **sampling.options()}
    inputs = torch.tensor([prompt_ids])
    for ids in model.stream(inputs, attention_mask=torch.ones_like(inputs), **options):
        yield int(ids[0])


def describe_route(route: Route | None) -> list[dict[str, str]]:
    """Return the hops for people and programs."""
    hops = route.hops if route is not None else ()
    return [
        {
            "server": hop.server.public_name or hop.server.server_id[:8],
            "server_id": hop.server.server_id,
            "address": hop.server.address,
            "span": str(hop.span),
        }
        for hop in hops
    ]
