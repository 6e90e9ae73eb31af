"""From a model's files to the parts of a server: which span, its facts, its weights, its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import grpc.aio
import psutil
import torch

from services.block_server.cache.pool import PAGE_TOKENS, PagePool
from services.block_server.cache.storage import KvStorage
from services.block_server.engine.engine import Engine, EngineOptions
from services.block_server.facts import Facts
from services.block_server.placement import choose_span
from services.block_server.settings import BlockServerSettings
from services.block_server.weights.span_model import SpanModel, load_span
from shoal.dht.directory import SwarmDirectory
from shoal.models.checkpoint import Checkpoint, span_names
from shoal.models.files import HubOptions
from shoal.models.hash_cache import hash_cache_file
from shoal.models.identity import block_hashes, dtype_of, model_key
from shoal.models.sources import open_model
from shoal.swarm.snapshot import Capacity, ModelKey, ServerState
from shoal.swarm.spans import Span
from shoal.v1 import registry_pb2, registry_pb2_grpc
from shoal.wire.errors import NotFound, ShoalError, SpanMismatch, TimedOut, Unavailable, Unsupported
from shoal.wire.membership import Membership
from shoal.wire.records import model_to_proto
from shoal.wire.status import from_rpc_error

_COVERAGE_TIMEOUT_S = 10.0
_DHT_WAIT_S = 30.0

T = TypeVar("T")


def open_checkpoint(settings: BlockServerSettings) -> Checkpoint:
    """Open the model that the settings name; no weights are fetched yet. Blocks; call it in a thread.

    Raises:
        ShoalError: as `open_model`.
    """
    token = settings.hub_token.get_secret_value() if settings.hub_token else None
    hub = HubOptions(settings.revision or None, token, settings.cache_dir)
    return open_model(settings.model, hub, allow_pickle=settings.allow_pickle)


async def in_thread(checkpoint: Checkpoint, work: Callable[[], T]) -> T:
    """Run work that may fetch files in a thread; a cancellation ends the fetch, which would take its time otherwise."""
    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        checkpoint.files.stop()
        raise


def fixed_span(settings: BlockServerSettings, num_blocks: int) -> Span | None:
    """Return the span that the settings name, None if the swarm's coverage must be asked.

    Raises:
        SpanMismatch: if the model has not these blocks.
    """
    if settings.blocks:
        span = Span.parse(settings.blocks)
        if span.end > num_blocks:
            raise SpanMismatch(f"--blocks {span} asked for, the model has blocks 0:{num_blocks}")
        return span
    if settings.num_blocks > num_blocks:
        raise SpanMismatch(f"--num-blocks {settings.num_blocks} asked for, the model has {num_blocks} blocks")
    return Span(0, num_blocks) if settings.num_blocks in (0, num_blocks) else None


def usable_device(name: str) -> torch.device:
    """Return torch's device of that name.

    Raises:
        Unsupported: if torch does not know it or cannot use it here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # torch says RuntimeError for a driver, AssertionError for a build without it, NotImplementedError for a backend.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:200]
        raise Unsupported(f"--device {name} cannot be used on this machine: {reason}") from error
    return device


async def place(
    membership: Membership, directory: SwarmDirectory | None, model: ModelKey, num_blocks: int, length: int
) -> Span:
    """Choose `length` blocks by what is known of coverage now: the registry's answer, else the DHT's records.

    A gap in a partial answer need not be one, so the DHT is asked about it too.

    Raises:
        ShoalError: what the registry said, if the DHT knows no better.
    """
    try:
        counts, partial = await _registry_counts(membership, model, num_blocks)
    except (Unavailable, TimedOut):
        if directory is None:
            raise
        counts = await _dht_counts(directory, model, num_blocks)
    else:
        if partial and directory is not None:
            with suppress(Unavailable):
                others = await _dht_counts(directory, model, num_blocks)
                counts = [max(pair) for pair in zip(counts, others, strict=True)]
    return choose_span(counts, length)


async def _registry_counts(membership: Membership, model: ModelKey, num_blocks: int) -> tuple[list[int], bool]:
    """Return how many servers hold each block, and whether the registry says that some may be missing."""
    request = registry_pb2.GetCoverageRequest(model=model_to_proto(model))
    counts = [0] * num_blocks
    try:
        stub = registry_pb2_grpc.RegistryServiceStub(membership.registry)
        answer = await stub.GetCoverage(request, timeout=_COVERAGE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        found: ShoalError = from_rpc_error(error)
        if not isinstance(found, NotFound):
            raise found from error
        return counts, True  # nobody serves the model, or nobody has told the registry yet
    for entry in answer.blocks:
        if entry.block < num_blocks:
            counts[entry.block] = entry.online_servers + entry.joining_servers
    return counts, bool(answer.partial)


async def _dht_counts(directory: SwarmDirectory, model: ModelKey, num_blocks: int) -> list[int]:
    snapshot = await directory.snapshot(model.prefix, wait_s=_DHT_WAIT_S)
    if snapshot.partial:
        raise Unavailable("neither registry nor DHT says which blocks are served; name them with --blocks")
    counts = [0] * num_blocks
    for server in snapshot.of_model(model):
        for block in server.span.blocks() if server.num_blocks == num_blocks else ():
            counts[block] += server.state in (ServerState.ONLINE, ServerState.JOINING)
    return counts


def describe_server(settings: BlockServerSettings, checkpoint: Checkpoint, span: Span, server_id: str) -> Facts:
    """Fetch and hash the span's blocks, and put together what the server says of itself. Blocks.

    Raises:
        NotFound, Corrupted: if tensors or files of the span are missing or damaged.
        Unsupported: for an unknown numeric class.
        ShoalError: as `ModelFiles.fetch`.
    """
    family = checkpoint.family
    # All files of the span at once, and before any tensor is read.
    checkpoint.files_of(span_names(family, span))
    hashes = block_hashes(checkpoint, family, span, cache_file=hash_cache_file(settings.cache_dir))
    pages = settings.cache_tokens // PAGE_TOKENS
    limits = [pages * PAGE_TOKENS, settings.max_session_tokens, family.max_positions]
    return Facts(
        server_id=server_id,
        model=model_key(checkpoint, settings.dtype, settings.model_name or None),
        family=family,
        span=span,
        block_hashes=tuple(hashes),
        dtype=dtype_of(settings.dtype),
        capacity=Capacity(
            cache_token_blocks=pages * PAGE_TOKENS * len(span),
            max_session_tokens=min(limit for limit in limits if limit),
            max_session_rows=settings.max_session_rows,
            max_step_tokens=settings.max_step_tokens,
        ),
        max_sessions=settings.max_sessions,
        idle_timeout_s=settings.idle_timeout_s,
    )


def build_engine(settings: BlockServerSettings, checkpoint: Checkpoint, facts: Facts) -> Engine:
    """Load the span and build its engine, not started. Takes seconds; call it in a thread.

    Raises:
        NotFound, Corrupted: as `load_span`.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = load_model(settings, checkpoint, facts, facts.span)
    storage = make_storage(settings, facts)
    pages = facts.capacity.cache_token_blocks // (PAGE_TOKENS * len(facts.span))
    options = EngineOptions(
        max_step_tokens=settings.max_step_tokens,
        max_waiting=2 * settings.max_sessions + 8,
        threads=settings.threads,
        account_share=settings.account_share,
    )
    return Engine(model, PagePool(pages, len(facts.span)), storage, options)


def load_model(settings: BlockServerSettings, checkpoint: Checkpoint, facts: Facts, span: Span) -> SpanModel:
    """Load blocks that the server is to compute. Takes seconds; call it in a thread.

    Raises:
        NotFound, Corrupted: as `load_span`.
    """
    device = usable_device(settings.device)
    return load_span(checkpoint, span, facts.dtype, device, fused=settings.fused, how=settings.compile)


def make_storage(settings: BlockServerSettings, facts: Facts) -> KvStorage:
    """Make empty storage for the span's cache."""
    family, blocks = facts.family, len(facts.span)
    pages = facts.capacity.cache_token_blocks // (PAGE_TOKENS * blocks)
    device = usable_device(settings.device)
    return KvStorage(blocks, pages, family.kv_heads, family.head_dim, dtype=facts.dtype, device=device)


def give_back_memory(device: torch.device) -> None:
    """Give memory that nothing uses any more back to the device's other users."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Return how many bytes the device can still give."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
