"""The frames in which a step's output leaves a session: to the client, and to the next hop. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.block_server.engine.work import StepOutcome
from services.block_server.frames import StepPlan
from shoal.v1 import block_server_pb2 as pb
from shoal.v1 import common_pb2
from shoal.wire.clock import to_duration
from shoal.wire.tensors import chunks

Cut = Sequence[tuple[int, bytes]]


def step_answers(
    plan: StepPlan, outcome: StepOutcome, header: common_pb2.TensorHeader, cut: Cut, digest: bytes
) -> list[pb.InferResponse]:
    """Return the frames that answer a step to the client: its output, cut into pieces."""
    first = pb.StepResponse(
        step=plan.step,
        row_positions=outcome.row_positions,
        tensor=header,
        data=cut[0][1],
        output_digest=digest,
        queue_time=to_duration(outcome.queue_s),
        engine_time=to_duration(outcome.engine_s),
        packed_sessions=outcome.packed_sessions,
    )
    return [pb.InferResponse(step=first), *(pb.InferResponse(chunk=chunk) for chunk in chunks(plan.step, cut[1:]))]


def step_pushes(plan: StepPlan, header: common_pb2.TensorHeader, cut: Cut) -> list[pb.PushRequest]:
    """Return the frames that bring a step's output to the next hop as its input."""
    before = [after - new for after, new in zip(plan.row_positions, plan.row_lengths, strict=True)]
    first = pb.StepRequest(
        step=plan.step,
        row_positions=before,
        row_lengths=plan.row_lengths,
        row_sources=plan.row_sources,
        truncate=plan.truncate,
        tensor=header,
        data=cut[0][1],
    )
    return [pb.PushRequest(step=first), *(pb.PushRequest(chunk=chunk) for chunk in chunks(plan.step, cut[1:]))]
