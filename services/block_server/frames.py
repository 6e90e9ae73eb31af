"""Checks frames of an `Infer` stream against what the server is and where the session stands. Pure.

Every check is made before anything is allocated. What comes back holds only values that passed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.block_server.facts import Facts
from shoal.swarm.spans import Span
from shoal.v1 import block_server_pb2 as pb
from shoal.v1 import common_pb2
from shoal.wire.clock import from_duration, from_timestamp
from shoal.wire.errors import (
    BadTensor,
    BlockHashMismatch,
    Corrupted,
    InvalidRequest,
    NotFound,
    ServerDraining,
    SpanMismatch,
    StepOutOfOrder,
    TimedOut,
    TooLong,
    UnknownModel,
    Unsupported,
)
from shoal.wire.records import check_protocol, model_from_proto, span_from_proto
from shoal.wire.tensors import TensorAssembler, check_codec, dtype_from_wire
from shoal.wire.tls import certificate_name

_SESSION_ID = re.compile(r"[0-9a-f]{32}")
_HASH_BYTES = 32
PUSH_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """A session as it was asked for. `deadline_s` is wall-clock time, infinite if there is none."""

    session_id: str
    span: Span
    rows: int
    max_tokens: int
    output_codec: common_pb2.Codec.ValueType
    deadline_s: float
    cache_wait_s: float
    prefixes: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step that may run.

    First rows go on from `row_sources`, if any are named; then they forget all but `kept` tokens, if that is given;
    then they take `row_lengths` more and hold `row_positions`. `truncate` is what the next hop is told: it may have to
    forget where this one has nothing to forget.
    """

    step: int
    row_sources: tuple[int, ...]
    kept: tuple[int, ...] | None
    truncate: bool
    row_lengths: tuple[int, ...]
    row_positions: tuple[int, ...]
    wants_digest: bool
    deadline_s: float


def check_open(opening: pb.OpenSession, facts: Facts, now_s: float) -> SessionPlan:
    """Check the opening frame.

    Raises:
        ShoalError: saying what does not fit: protocol, ids, model, span, hashes, formats, sizes, options, deadline.
    """
    check_protocol(opening.protocol, "the client")
    if not _SESSION_ID.fullmatch(opening.session_id):
        raise InvalidRequest("session_id needs 32 lower-case hexadecimal digits")
    if opening.server_id != facts.server_id:
        raise NotFound(f"this server is {facts.server_id}, the session is meant for {opening.server_id[:64]!r}")
    if model_from_proto(opening.model) != facts.model:
        raise UnknownModel(f"this server holds {facts.model}; ask the registry which servers hold yours")
    span = span_from_proto(opening.span)
    # Not `span.blocks()`: a caller may name billions of them.
    if not facts.span.covers(span) and any(span.start <= block < span.end for block in facts.left):
        raise ServerDraining(f"this server has left blocks {span} and holds {facts.span} now; use another one")
    if not facts.span.covers(span):
        raise SpanMismatch(f"blocks {span} asked for, this server holds {facts.span}")
    _check_hashes(opening.block_hashes, span, facts)
    _check_formats(opening, facts)
    _check_sizes(opening, facts)
    check_link(opening.push_key, opening.next_hop if opening.HasField("next_hop") else None)
    return SessionPlan(
        session_id=opening.session_id,
        span=span,
        rows=opening.rows,
        max_tokens=opening.max_tokens,
        output_codec=opening.output_codec or opening.codec,
        deadline_s=_deadline(opening, now_s),
        cache_wait_s=min(from_duration(opening.cache_wait), facts.max_cache_wait_s),
        prefixes=_prefixes(opening),
    )


def check_link(push_key: bytes, target: pb.PushTarget | None) -> None:
    """Check where steps are to come from and outputs to go.

    Raises:
        InvalidRequest: if a secret is too short, or the next hop is not named in full.
    """
    if push_key and len(push_key) < PUSH_KEY_BYTES:
        raise InvalidRequest(f"push_key needs at least {PUSH_KEY_BYTES} random bytes")
    if target is None:
        return
    host, _, port = target.address.rpartition(":")
    if not (target.server_id and host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidRequest("next_hop needs a server id and an address HOST:PORT")
    if len(target.push_key) < PUSH_KEY_BYTES:
        raise InvalidRequest(f"next_hop needs a push_key of at least {PUSH_KEY_BYTES} random bytes")
    if certificate_name(target.certificate) != target.server_id:
        raise InvalidRequest("next_hop needs the certificate of the server that it names")


def check_lengths(request: pb.StepRequest, plan: SessionPlan) -> None:
    """Check what can be known of a step wherever the session stands.

    Raises:
        InvalidRequest: if it is not for all rows, or brings nothing.
        TooLong: if a row could never hold it.
    """
    if len(request.row_positions) != plan.rows or len(request.row_lengths) != plan.rows:
        raise InvalidRequest(f"row_positions and row_lengths need {plan.rows} entries each, one for each row")
    after = max(held + new for held, new in zip(request.row_positions, request.row_lengths, strict=True))
    if after > plan.max_tokens:
        raise TooLong(f"a row would hold {after} tokens, the session was opened for {plan.max_tokens}")
    if not any(request.row_lengths):
        raise InvalidRequest("a step needs at least one token")
    if request.input_digest and len(request.input_digest) != _HASH_BYTES:
        raise InvalidRequest("input_digest needs 32 bytes or none")
    if request.row_sources and (
        len(request.row_sources) != plan.rows or any(source >= plan.rows for source in request.row_sources)
    ):
        raise InvalidRequest(f"row_sources needs a row below {plan.rows} for each of the {plan.rows} rows, or none")


def check_order(request: pb.StepRequest, positions: Sequence[int], number: int, now_s: float) -> StepPlan:
    """Check that a step with good lengths is step `number`, on rows that hold `positions` tokens.

    Raises:
        StepOutOfOrder: if number or positions are not the server's; the details have both.
        TimedOut: if its deadline has passed.
    """
    if request.step != number or request.acknowledged_step > number:
        raise StepOutOfOrder(
            f"step {request.step} came, step {number} is next", step=str(number), positions=_text(positions)
        )
    sources = tuple(request.row_sources)
    held = [positions[source] for source in sources] if sources else list(positions)
    before = list(request.row_positions)
    if before != held and not (
        request.truncate and all(keep <= there for keep, there in zip(before, held, strict=True))
    ):
        raise StepOutOfOrder(
            "the rows' positions are not the server's; roll back or replay",
            step=str(number),
            positions=_text(held),
        )
    lengths = tuple(request.row_lengths)
    return StepPlan(
        step=number,
        row_sources=sources,
        kept=tuple(before) if before != held else None,
        truncate=request.truncate,
        row_lengths=lengths,
        row_positions=tuple(start + new for start, new in zip(before, lengths, strict=True)),
        wants_digest=bool(request.input_digest),
        deadline_s=_deadline(request, now_s),
    )


def check_rollback(request: pb.RollbackRequest, positions: Sequence[int]) -> tuple[int, ...]:
    """Check a rollback of rows that hold `positions` tokens; return what they hold afterwards.

    Raises:
        InvalidRequest: if it is not for all rows, or a row does not hold that many.
    """
    wanted = tuple(request.row_positions)
    if len(wanted) != len(positions):
        raise InvalidRequest(f"row_positions needs {len(positions)} entries, one for each row")
    if any(keep > held for keep, held in zip(wanted, positions, strict=True)):
        raise InvalidRequest(f"rows hold {_text(positions)} tokens and cannot be rolled back to {_text(wanted)}")
    return wanted


def begin_tensor(request: pb.StepRequest, facts: Facts) -> TensorAssembler:
    """Check the header of a checked step's tensor and take its first bytes.

    Raises:
        BadTensor, TooLong, Unsupported: if it does not fit the step or is too large.
    """
    shape = (sum(request.row_lengths), facts.family.hidden_size)
    if math.prod(shape) * facts.dtype.itemsize > facts.max_tensor_bytes:
        raise TooLong(f"a step of {shape[0]} tokens is too large, send at most {max_step(facts)}")
    assembler = TensorAssembler(request.tensor, expect_dtype=facts.dtype, expect_shape=shape)
    assembler.add(0, request.data)
    return assembler


def max_step(facts: Facts) -> int:
    """Return how many tokens one step may have over all rows."""
    return facts.max_tensor_bytes // (facts.family.hidden_size * facts.dtype.itemsize)


def check_chunk(chunk: pb.TensorChunk, number: int) -> None:
    """Check that a chunk belongs to the step under way.

    Raises:
        StepOutOfOrder: if not.
    """
    if chunk.step != number:
        raise StepOutOfOrder(f"a chunk of step {chunk.step} came during step {number}", step=str(number))


def finish_tensor(assembler: TensorAssembler, request: pb.StepRequest) -> torch.Tensor:
    """Return the step's activations `[tokens, hidden]`.

    NaN and infinity are refused: they would spoil the session's cache for good, and the answer would blame this
    server for what came before it.

    Raises:
        BadTensor: if it is cut short or not finite.
        Corrupted: if checksum or digest do not fit.
    """
    hidden = assembler.tensor()
    if request.input_digest and hashlib.sha256(assembler.encoded).digest() != request.input_digest:
        raise Corrupted("the step's bytes do not fit input_digest; they changed on the way")
    if not bool(torch.isfinite(hidden).all()):
        raise BadTensor("the step's activations have NaN or infinity")
    return hidden


def _check_hashes(hashes: Sequence[bytes], span: Span, facts: Facts) -> None:
    if not hashes:
        return
    if len(hashes) != len(span) or any(len(digest) != _HASH_BYTES for digest in hashes):
        raise InvalidRequest(f"block_hashes needs 32 bytes for each of the {len(span)} blocks of {span}, or none")
    for block, digest in zip(span.blocks(), hashes, strict=True):
        if digest != facts.block_hashes[block - facts.span.start]:
            raise BlockHashMismatch(f"this server holds other weights for block {block}", block=str(block))


def _check_formats(opening: pb.OpenSession, facts: Facts) -> None:
    if dtype_from_wire(opening.activation_dtype) != facts.dtype:
        raise Unsupported(f"this server takes activations only as {facts.dtype}")
    check_codec(opening.codec)
    check_codec(opening.output_codec or opening.codec)
    if opening.adapter:
        raise Unsupported("this server has no adapters")
    if opening.bid_micropoints or opening.ticket:
        raise Unsupported("points are not in use here; leave bid_micropoints and ticket out")


def _prefixes(opening: pb.OpenSession) -> tuple[tuple[bytes, ...], ...]:
    chains = tuple(tuple(chain.page_hashes) for chain in opening.prefixes)
    if chains and len(chains) != opening.rows:
        raise InvalidRequest(f"prefixes needs {opening.rows} entries, one for each row, or none")
    if any(len(digest) != _HASH_BYTES for chain in chains for digest in chain):
        raise InvalidRequest(f"page_hashes needs {_HASH_BYTES} bytes for each page")
    return chains


def _check_sizes(opening: pb.OpenSession, facts: Facts) -> None:
    if not 1 <= opening.rows <= facts.capacity.max_session_rows:
        raise InvalidRequest(f"rows must be 1 to {facts.capacity.max_session_rows}, got {opening.rows}")
    if opening.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1")
    if opening.max_tokens > facts.capacity.max_session_tokens:
        raise TooLong(
            f"the session wants {opening.max_tokens} tokens per row, this server takes "
            f"{facts.capacity.max_session_tokens}",
            max_session_tokens=str(facts.capacity.max_session_tokens),
        )


def _deadline(message: pb.OpenSession | pb.StepRequest, now_s: float) -> float:
    if not message.HasField("deadline"):
        return math.inf
    deadline_s = from_timestamp(message.deadline)
    if deadline_s <= now_s:
        raise TimedOut("the deadline has passed already")
    return deadline_s


def _text(positions: Sequence[int]) -> str:
    return ",".join(str(position) for position in positions)
