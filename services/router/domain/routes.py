"""From a caller's wishes and a snapshot to routes, or to the error that says why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.swarm.coverage import spell_blocks
from shoal.swarm.routing import MissingBlocks, Route, RouteRequest, plan_route
from shoal.swarm.snapshot import ModelKey, SwarmSnapshot
from shoal.swarm.spans import Span
from shoal.wire.errors import InvalidRequest, NoRoute, SpanMismatch, UnknownModel

MOST_ROWS = 1_000_000
MOST_TOKENS = 100_000_000


@dataclass(frozen=True, slots=True)
class Wish:
    """A request as the caller made it: `blocks` None means all blocks of the model."""

    request: RouteRequest
    blocks: Span | None


def find_routes(snapshot: SwarmSnapshot, wish: Wish) -> list[Route]:
    """Return the cheapest route and the alternatives asked for.

    Raises:
        UnknownModel: if no server serves the model; the message names what is served.
        InvalidRequest: if sizes make no sense (SpanMismatch for the blocks).
        NoRoute: if blocks are missing; they are named, with the reason.
    """
    request = replace(wish.request, blocks=_blocks(snapshot, wish))
    _check_sizes(request)
    planned = plan_route(snapshot, request)
    if isinstance(planned, MissingBlocks):
        raise NoRoute(
            f"no route for blocks {request.blocks} now: {planned.reason}; start a server for them, or try again later",
            blocks=spell_blocks(planned.blocks),
        )
    return planned


def _blocks(snapshot: SwarmSnapshot, wish: Wish) -> Span:
    num_blocks = snapshot.models().get(wish.request.model)
    if num_blocks is None:
        raise _unknown(snapshot, wish.request.model)
    if wish.blocks is not None and wish.blocks.end > num_blocks:
        raise SpanMismatch(f"blocks {wish.blocks} were asked for, {wish.request.model} has {num_blocks}")
    return wish.blocks or Span(0, num_blocks)


def _unknown(snapshot: SwarmSnapshot, model: ModelKey) -> UnknownModel:
    served = sorted(str(other) for other in snapshot.models())
    alike = [name for other, name in ((key, str(key)) for key in snapshot.models()) if other.prefix == model.prefix]
    if alike:
        what = "the same name with another config or number format is served"
        return UnknownModel(f"no server serves {model}; {what}: {', '.join(sorted(alike)[:10])}")
    return UnknownModel(f"no server serves {model}; models served now: {', '.join(served[:10]) or 'none'}")


def _check_sizes(request: RouteRequest) -> None:
    if not 1 <= request.max_tokens <= MOST_TOKENS:
        raise InvalidRequest(f"max_tokens must be 1 to {MOST_TOKENS}, got {request.max_tokens}")
    if request.prompt_tokens > request.max_tokens:
        raise InvalidRequest(
            f"a prompt of {request.prompt_tokens} tokens does not fit into max_tokens {request.max_tokens}, "
            "which counts the prompt too"
        )
    if not 1 <= request.rows <= MOST_ROWS:
        raise InvalidRequest(f"rows must be 1 to {MOST_ROWS}, got {request.rows}")
    if request.block_hashes and len(request.block_hashes) != len(request.blocks):
        raise InvalidRequest(
            f"{len(request.block_hashes)} block hashes for the {len(request.blocks)} blocks {request.blocks}; "
            "send one for each block, or none"
        )
