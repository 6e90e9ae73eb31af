"""What the client reads of a model, and routes over any cover of the blocks, with real numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from shoal.client.config import SequenceManagerConfig
from shoal.models.checkpoint import end_names
from shoal.swarm.spans import Span, tiles
from shoal.wire.errors import NoRoute
from tests.support.fake_server import FakeSwarm
from tests.support.tiny_models import make_tiny

IDS = torch.tensor([[5, 17, 3, 60, 9, 22, 41, 8], [7, 7, 2, 90, 11, 64, 30, 1]])


def check_logits(swarm: FakeSwarm) -> None:
    with torch.no_grad():
        wanted = swarm.reference(IDS).logits
    torch.testing.assert_close(swarm.model(IDS).logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("stored", ["embedding", "head", "both"])
def test_ml02_tied_ends_under_either_stored_name(
    tmp_path: Path, family: str, stored: Literal["embedding", "head", "both"]
) -> None:
    folder = make_tiny(tmp_path / "tied", family, tied=True, stored_ends=stored)
    with FakeSwarm(folder, "0:6") as swarm:
        head, embedding = swarm.model.get_output_embeddings().weight, swarm.model.get_input_embeddings().weight
        assert head.data_ptr() == embedding.data_ptr()
        check_logits(swarm)


def test_ml02_untied_ends_stay_two_matrices(tmp_path: Path) -> None:
    with FakeSwarm(make_tiny(tmp_path / "untied"), "0:6") as swarm:
        head, embedding = swarm.model.get_output_embeddings().weight, swarm.model.get_input_embeddings().weight
        assert not torch.equal(head, embedding)
        check_logits(swarm)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_the_client_reads_the_ends_and_no_block(tmp_path: Path, family: str) -> None:
    with FakeSwarm(make_tiny(tmp_path / "tiny", family, shards=3), "0:6") as swarm:
        assert swarm.checkpoint.opened == set(end_names(swarm.checkpoint.family))
        parameters = [name for name, _ in swarm.model.named_parameters()]
        assert not [name for name in parameters if name.startswith(swarm.checkpoint.family.blocks_path)]


@pytest.fixture(scope="module")
def every_span(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSwarm]:
    """A server for each of the 21 spans of six blocks."""
    cuts = [f"{start}:{end}" for start in range(6) for end in range(start + 1, 7)]
    with FakeSwarm(make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama"), *cuts) as swarm:
        for record in swarm.records:
            connect(swarm, record)
        yield swarm


def connect(swarm: FakeSwarm, record: Any) -> None:
    """Open one session on a server, so that no test is blamed for the connection."""
    swarm.connection.config = SequenceManagerConfig(allowed_servers=(record.server_id,), open_timeout_s=5.0)
    swarm.connection.open_session(max_tokens=1, span=record.span).close()


@pytest.mark.parametrize("seed", range(20))
def test_rt01_any_cover_gives_the_models_logits(every_span: FakeSwarm, seed: int) -> None:
    generator = random.Random(seed)
    chosen = generator.sample(every_span.records, generator.randrange(3, 9))
    covered = {block for record in chosen for block in record.span.blocks()}
    allowed = tuple(record.server_id for record in chosen)
    every_span.connection.config = SequenceManagerConfig(allowed_servers=allowed, open_timeout_s=0.0)
    if covered == set(range(6)):
        check_logits(every_span)
        route = every_span.connection.last_route
        assert route is not None
        assert tiles((hop.span for hop in route.hops), Span(0, 6))
        assert {hop.server.server_id for hop in route.hops} <= set(allowed)
    else:
        with pytest.raises(NoRoute, match=str(min(set(range(6)) - covered))):
            every_span.model(IDS)
