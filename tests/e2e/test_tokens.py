"""Separate processes, real weights: the ids of plain transformers through one, two and three servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from services.up.small_model import ensure_small_model
from shoal import AutoDistributedModelForCausalLM, SequenceManagerConfig
from tests.support.swarm import LiveSwarm
from tests.support.tiny_models import load_reference, make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["Why is the sky blue?", "Name three rivers of Europe and say one thing about each of them.", "Hi!"]


class Topologies:
    """One swarm whose servers hold the whole model, its halves and its thirds, and a client for each cut."""

    def __init__(self, swarm: LiveSwarm, folder: Path, cuts: list[list[str]]) -> None:
        ids = {server.public_name: server.server_id for server in swarm.status().servers}
        self.reference: Any = load_reference(folder)
        self.models: list[Any] = []
        first = 1
        for cut in cuts:
            names = [f"server-{number}" for number in range(first, first + len(cut))]
            config = SequenceManagerConfig(allowed_servers=tuple(ids[name] for name in names))
            self.models.append(
                AutoDistributedModelForCausalLM.from_pretrained(
                    folder, swarm=swarm.url, api_key=swarm.api_key, config=config
                )
            )
            first += len(cut)

    def close(self) -> None:
        for model in self.models:
            model.connection.close()

    def warm_up(self) -> None:
        """Connect every client to its servers, so that no single test is blamed for the sockets."""
        for model in self.models:
            with model.inference_session(max_tokens=1):
                pass

    def check(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Generate locally and through each cut; all must be equal, and each route as long as its cut."""
        torch.manual_seed(7)
        wanted: torch.Tensor = self.reference.generate(ids, **options)
        for hops, model in enumerate(self.models, start=1):
            torch.manual_seed(7)
            given = model.generate(ids, **options)
            assert given.tolist() == wanted.tolist(), f"{hops} servers"
            assert len(model.connection.last_route.hops) == hops
        return wanted


def run(folder: Path, cuts: list[list[str]]) -> Iterator[Topologies]:
    with LiveSwarm(folder, [span for cut in cuts for span in cut]) as swarm:
        topologies = Topologies(swarm, folder, cuts)
        try:
            topologies.warm_up()
            yield topologies
        finally:
            topologies.close()


@pytest.fixture(scope="module")
def smol() -> Iterator[Topologies]:
    yield from run(ensure_small_model(), [["0:30"], ["0:15", "15:30"], ["0:10", "10:20", "20:30"]])


@pytest.fixture(scope="module", params=["llama", "llama-tied", "bloom"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topologies]:
    folder = tmp_path_factory.mktemp("models") / request.param
    make_tiny(folder, request.param.partition("-")[0], tied=request.param.endswith("tied"), shards=3)
    yield from run(folder, [["0:6"], ["0:2", "2:6"], ["0:1", "1:4", "4:6"]])


@pytest.fixture(scope="module")
def encode_chats() -> Any:
    found = AutoTokenizer.from_pretrained(str(ensure_small_model()), padding_side="left")
    found.pad_token = found.pad_token or found.eos_token

    def encode(prompts: str | list[str]) -> Any:
        chats = [prompts] if isinstance(prompts, str) else prompts
        texts = [
            found.apply_chat_template([{"role": "user", "content": chat}], tokenize=False, add_generation_prompt=True)
            for chat in chats
        ]
        return found(texts, return_tensors="pt", padding=True, add_special_tokens=False)

    return encode


def test_greedy_single(smol: Topologies, encode_chats: Any) -> None:
    batch = encode_chats(PROMPTS[0])
    answer = smol.check(batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=24, do_sample=False)
    assert len(set(answer[0].tolist())) > 10


def test_greedy_left_padded_batch(smol: Topologies, encode_chats: Any) -> None:
    batch = encode_chats(PROMPTS)
    smol.check(batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=16, do_sample=False)


def test_cg10_seeded_sampling_depends_on_nothing_but_the_seed(smol: Topologies, encode_chats: Any) -> None:
    batch = encode_chats(PROMPTS[1])
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    smol.check(batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=30, **sampling)


def test_seeded_sampling_of_a_left_padded_batch(smol: Topologies, encode_chats: Any) -> None:
    batch = encode_chats(PROMPTS)
    smol.check(batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=16, do_sample=True, top_k=20)


def test_logits_of_a_forward_pass(smol: Topologies, encode_chats: Any) -> None:
    ids = encode_chats(PROMPTS[1]).input_ids
    with torch.no_grad():
        wanted = smol.reference(ids).logits
    for model in smol.models:
        torch.testing.assert_close(model(ids).logits, wanted, atol=1e-4, rtol=0)


def test_sessions_packed_into_one_forward_give_their_solo_ids(smol: Topologies, encode_chats: Any) -> None:
    """Three at once on one server: while it computes one, the others wait and are packed, as the server tells."""
    model = smol.models[0]
    prompts = [encode_chats(prompt).input_ids for prompt in PROMPTS]
    solo = [smol.reference.generate(ids, max_new_tokens=16, do_sample=False)[0].tolist() for ids in prompts]
    together = [ids[0].tolist() for ids in prompts]
    packed: list[int] = []

    def generate(index: int) -> None:
        ids: torch.Tensor = prompts[index]
        cache: Any = None
        while len(together[index]) < len(solo[index]):
            output = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            ids, cache = output.logits[:, -1].argmax(dim=-1, keepdim=True), output.cache
            together[index].append(int(ids))
            packed.extend(timing.packed_sessions for timing in cache.session.timings)
        cache.close()

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert together == solo
    assert max(packed) >= 2


def test_tiny_greedy_single(tiny: Topologies) -> None:
    ids = torch.tensor([[5, 17, 3, 60, 9, 22, 41]])
    first = tiny.check(ids, max_new_tokens=20, do_sample=False)
    shuffled = tiny.reference.generate(ids[:, [6, 2, 4, 1, 0, 3, 5]], max_new_tokens=20, do_sample=False)
    assert first[0, 7:].tolist() != shuffled[0, 7:].tolist()


def test_tiny_greedy_left_padded_batch(tiny: Topologies) -> None:
    ids = torch.randint(4, 90, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in enumerate((3, 7, 12)):
        ids[row, : 12 - length] = 0
        mask[row, : 12 - length] = 0
    batch = tiny.check(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    for row, length in enumerate((3, 7, 12)):
        alone = tiny.reference.generate(ids[row : row + 1, 12 - length :], max_new_tokens=20, do_sample=False)
        assert batch[row, 12:].tolist() == alone[0, length:].tolist()


def test_tiny_seeded_sampling(tiny: Topologies) -> None:
    ids = torch.tensor([[5, 17, 3, 60, 9, 22, 41]])
    tiny.check(ids, max_new_tokens=30, do_sample=True, temperature=0.8, top_p=0.95)
