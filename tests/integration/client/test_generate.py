"""The client's model over scripted servers: same ids as transformers, or a refusal by name."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer

from shoal.client.config import SequenceManagerConfig
from shoal.v1 import block_server_pb2 as pb
from shoal.wire.errors import CacheFull, Corrupted, InvalidRequest, ServerUnreachable, SessionLost, TooLong, Unsupported
from tests.support.fake_server import FakeSwarm
from tests.support.tiny_models import VOCABULARY, make_tiny
from tests.support.waiting import wait_until

PROMPT = torch.tensor([[5, 17, 3, 60, 9, 22, 41]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[FakeSwarm]:
    with FakeSwarm(folder, "0:2", "2:6") as running:
        running.model.inference_session(max_tokens=1).close()  # connects, so that no single test is blamed for it
        yield running


def left_padded(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(4, VOCABULARY, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


def test_cg01_left_padded_rows_give_the_ids_of_each_row_alone(swarm: FakeSwarm) -> None:
    ids, mask = left_padded(3, 7, 12)
    batch = swarm.model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    inferred = swarm.model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    for row, length in enumerate((3, 7, 12)):
        alone = swarm.reference.generate(ids[row : row + 1, 12 - length :], max_new_tokens=20, do_sample=False)
        assert batch[row, 12:].tolist() == alone[0, length:].tolist()
    assert inferred.tolist() == batch.tolist()


def test_cg01_padding_that_may_be_text_is_refused(swarm: FakeSwarm) -> None:
    ids, _ = left_padded(3, 7)
    with pytest.raises(InvalidRequest, match="pass attention_mask"):
        swarm.model.generate(ids, max_new_tokens=2, pad_token_id=0, eos_token_id=0)


# Each documented option with a value that is not its default; greedy unless the option is about sampling.
HONOURED: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 15, "max_new_tokens": None},
    "min_length": {"min_length": 14, "eos_token_id": [7, 11]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": [7, 11]},
    "max_time": {"max_time": 100.0},
    "do_sample": {"do_sample": True},
    "temperature": {"do_sample": True, "temperature": 0.6},
    "top_k": {"do_sample": True, "top_k": 4},
    "top_p": {"do_sample": True, "top_p": 0.7},
    "min_p": {"do_sample": True, "min_p": 0.1},
    "top_h": {"do_sample": True, "top_h": 0.5},
    "typical_p": {"do_sample": True, "typical_p": 0.5},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.02},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 0.02},
    "num_return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [9, 22]]},
    "renormalize_logits": {"renormalize_logits": True, "do_sample": True, "top_k": 5},
    "forced_bos_token_id": {"forced_bos_token_id": 4},
    "forced_eos_token_id": {"forced_eos_token_id": 4},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 7},
    "suppress_tokens": {"suppress_tokens": [3, 5, 8]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(40))},
    "sequence_bias": {"sequence_bias": [[[5], 8.0]]},
    "guidance_scale": {"guidance_scale": 1.7},
    "eos_token_id": {"eos_token_id": list(range(30))},
    "prefill_chunk_size": {"prefill_chunk_size": 3},
    "use_cache": {"use_cache": False},
    "logits_to_keep": {"logits_to_keep": 2},
    "bos_token_id": {"bos_token_id": 2},
    "pad_token_id": {"pad_token_id": 3, "eos_token_id": list(range(30))},
    "watermarking_config": {"watermarking_config": {"bias": 5.0, "seeding_scheme": "selfhash", "context_width": 2}},
    "disable_compile": {"disable_compile": True},
}


@pytest.mark.parametrize("name", sorted(HONOURED))
def test_cg02_each_honoured_option_gives_transformers_ids(swarm: FakeSwarm, name: str) -> None:
    ids, mask = left_padded(4, 9)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, **HONOURED[name]}
    torch.manual_seed(11)
    wanted = swarm.reference.generate(ids, **options)
    torch.manual_seed(11)
    assert swarm.model.generate(ids, **options).tolist() == wanted.tolist()
    assert wait_until(lambda: swarm.open_sessions == 0)


def test_cg02_outputs_asked_for_are_transformers(swarm: FakeSwarm) -> None:
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    wanted = swarm.reference.generate(PROMPT, output_scores=True, output_logits=True, **options)
    given = swarm.model.generate(PROMPT, output_scores=True, output_logits=True, **options)
    assert given.sequences.tolist() == wanted.sequences.tolist()
    for mine, theirs in zip(given.logits + given.scores, wanted.logits + wanted.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"made_up_option": 1},
        {"num_beam_groups": 3},
        {"num_beam_groups": 2},
        {"use_mtp": True},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "high"},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"output_attentions": True, "return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"cache_implementation": "paged"},
        {"cache_implementation": "quantized"},
        {"token_healing": True},
        {"custom_generate": "somebody/something", "trust_remote_code": True},
        {"past_key_values": ()},
        {"position_ids": torch.tensor([[3, 4, 5, 6, 7, 8, 9]])},
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])},
        {"attention_mask": torch.ones(1, 1, 7, 7)},
        {"assistant_early_exit": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_cg02_other_options_are_refused_by_name_before_any_call(swarm: FakeSwarm, options: dict[str, Any]) -> None:
    before = len(swarm.frames)
    with pytest.raises(ValueError, match=next(iter(options))):
        swarm.model.generate(PROMPT, max_new_tokens=4, **options)
    assert len(swarm.frames) == before


def test_cg02_every_option_of_generation_config_is_decided() -> None:
    """A new option of transformers must be put on one of the two lists before it can be used."""
    from transformers import GenerationConfig

    from shoal.client.options import UNSUPPORTED_OPTIONS

    inert = {"transformers_version", "_from_model_config", "decoder_start_token_id"}
    tested_elsewhere = {"max_new_tokens", "output_scores", "output_logits", "return_dict_in_generate", "stop_strings"}
    beams_and_drafts = {
        "num_beams",
        "length_penalty",
        "early_stopping",
        "prompt_lookup_num_tokens",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "max_matching_ngram_size",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
    }
    decided = inert | tested_elsewhere | beams_and_drafts | set(HONOURED) | set(UNSUPPORTED_OPTIONS)
    assert set(vars(GenerationConfig())) - decided == set()


def test_cg07_a_reader_on_another_thread_gets_the_error(folder: Path) -> None:
    class Tokenizer:
        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(f"{int(value)} " for value in ids)

    def fail(step: int) -> ServerUnreachable | None:
        return ServerUnreachable("power cut") if step >= 3 else None

    with FakeSwarm(folder, "0:6", fail=fail, config=SequenceManagerConfig(max_retries=0)) as swarm:
        streamer = TextIteratorStreamer(Tokenizer(), skip_prompt=True)
        raised: list[BaseException] = []

        def produce() -> None:
            try:
                swarm.model.generate(PROMPT, max_new_tokens=9, do_sample=False, streamer=streamer)
            except ServerUnreachable as error:
                raised.append(error)

        thread = threading.Thread(target=produce)
        thread.start()
        seen: list[str] = []

        def consume() -> None:
            for text in streamer:
                seen.append(text)

        with pytest.raises(ServerUnreachable, match="power cut"):
            consume()
        thread.join(5)
        wanted = swarm.reference.generate(PROMPT, max_new_tokens=3, do_sample=False)[0, 7:].tolist()
        assert "".join(seen).split() == [str(value) for value in wanted[: len("".join(seen).split())]]
        assert len("".join(seen).split()) >= 2
        assert len(raised) == 1
        assert not thread.is_alive()


def test_cg07_stream_raises_after_the_ids_that_came(folder: Path) -> None:
    def fail(step: int) -> ServerUnreachable | None:
        return ServerUnreachable("power cut") if step == 3 else None

    with FakeSwarm(folder, "0:6", fail=fail, config=SequenceManagerConfig(max_retries=0)) as swarm:
        stream = swarm.model.stream(PROMPT, max_new_tokens=9, do_sample=False)
        wanted = swarm.reference.generate(PROMPT, max_new_tokens=3, do_sample=False)[0, 7:].tolist()
        assert [int(next(stream)) for _ in wanted] == wanted
        with pytest.raises(ServerUnreachable, match="power cut"):
            next(stream)
        assert not [thread for thread in threading.enumerate() if thread.name == "shoal-generate"]
        assert wait_until(lambda: swarm.open_sessions == 0)


def test_forward_gives_transformers_logits(swarm: FakeSwarm) -> None:
    ids, mask = left_padded(4, 9)
    wanted = swarm.reference(ids, attention_mask=mask).logits
    given = swarm.model(ids, attention_mask=mask)
    torch.testing.assert_close(given.logits[mask.bool()], wanted[mask.bool()], atol=1e-4, rtol=0)
    assert given.get("cache") is None
    embeds = swarm.model.get_input_embeddings()(PROMPT)
    torch.testing.assert_close(
        swarm.model(inputs_embeds=embeds).logits, swarm.reference(PROMPT).logits, atol=1e-4, rtol=0
    )
    loss = swarm.model(PROMPT, labels=PROMPT).loss
    torch.testing.assert_close(loss, swarm.reference(PROMPT, labels=PROMPT).loss, atol=1e-4, rtol=0)


def test_forward_with_a_cache_goes_on_where_it_was(swarm: FakeSwarm) -> None:
    first = swarm.model(PROMPT[:, :4], use_cache=True)
    second = swarm.model(PROMPT[:, 4:], cache=first.cache)
    wanted = swarm.reference(PROMPT).logits
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), wanted, atol=1e-4, rtol=0)
    first.cache.close()
    with pytest.raises(SessionLost, match="closed"):
        swarm.model(PROMPT[:, :1], cache=first.cache)


@pytest.mark.parametrize("options", [{"output_attentions": True}, {"made_up": 1}, {"output_hidden_states": True}])
def test_forward_refuses_by_name(swarm: FakeSwarm, options: dict[str, Any]) -> None:
    before = len(swarm.frames)
    with pytest.raises(Unsupported, match=next(iter(options))):
        swarm.model(PROMPT, **options)
    assert len(swarm.frames) == before


def test_gradients_are_refused(swarm: FakeSwarm) -> None:
    embeds = swarm.model.get_input_embeddings()(PROMPT).detach().requires_grad_(True)
    with pytest.raises(Unsupported, match="gradients"):
        swarm.model(inputs_embeds=embeds)


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 10_000])
def test_ids_out_of_the_vocabulary_are_refused_with_their_place(swarm: FakeSwarm, bad: int) -> None:
    before = len(swarm.frames)
    ids = PROMPT.clone()
    ids[0, 4] = bad
    for call in (swarm.model, lambda value: swarm.model.generate(value, max_new_tokens=2)):
        with pytest.raises(InvalidRequest, match=f"id {bad} at row 0, column 4.*vocabulary of {VOCABULARY}"):
            call(ids)
    assert len(swarm.frames) == before


def test_a_prompt_that_is_too_long_is_refused_with_the_limit(swarm: FakeSwarm) -> None:
    before = len(swarm.frames)
    with pytest.raises(TooLong, match=r"505 prompt tokens and 8 new ones.*512"):
        swarm.model.generate(torch.ones(1, 505, dtype=torch.long), max_new_tokens=8)
    with pytest.raises(TooLong, match="512"):
        swarm.model(torch.ones(1, 513, dtype=torch.long))
    assert len(swarm.frames) == before


def test_a_session_takes_hidden_states_step_by_step(swarm: FakeSwarm) -> None:
    hidden = torch.randn(2, 5, swarm.connection.hidden_size)
    with swarm.model.inference_session(max_tokens=8, batch_size=2) as session:
        parts = [session.step(hidden[:, :3]), session.step(hidden[:, 3:])]
        assert session.positions == (5, 5)
        with pytest.raises(TooLong, match="opened for 8"):
            session.step(torch.randn(2, 4, swarm.connection.hidden_size))
        with pytest.raises(ValueError, match="hidden states must be"):
            session.step(torch.randn(2, 1, 5))
        assert [timing.server_id for timing in session.timings] == [server.server_id for server in swarm.servers]
    blocks = swarm.reference.model(inputs_embeds=hidden[1:], use_cache=False)
    normed = swarm.model.model.norm(torch.cat(parts, dim=1))
    torch.testing.assert_close(normed[1:], blocks.last_hidden_state, atol=1e-4, rtol=0)
    session.close()
    with pytest.raises(SessionLost):
        session.step(hidden[:, :1])


def test_a_forgotten_session_is_closed_by_the_collector(swarm: FakeSwarm) -> None:
    session = swarm.model.inference_session(max_tokens=8)
    assert swarm.open_sessions == 2
    del session
    gc.collect()
    assert wait_until(lambda: swarm.open_sessions == 0)


def test_a_full_server_is_left_for_another(folder: Path) -> None:
    with FakeSwarm(folder, "0:6", "0:6", config=SequenceManagerConfig(open_timeout_s=0.5)) as swarm:
        swarm.servers[0].refuse = CacheFull("no room")
        wanted = swarm.reference.generate(PROMPT, max_new_tokens=4, do_sample=False)
        for _ in range(2):
            given = swarm.model.generate(PROMPT, max_new_tokens=4, do_sample=False)
            assert given.tolist() == wanted.tolist()
        swarm.servers[1].refuse = CacheFull("no room here either")
        with pytest.raises(CacheFull, match="no room"):
            swarm.model.generate(PROMPT, max_new_tokens=4)


def test_answers_that_do_not_fit_are_corrupted_not_used(folder: Path) -> None:
    def damage(answer: pb.InferResponse) -> pb.InferResponse:
        if answer.WhichOneof("frame") == "step":
            answer.step.data = bytes([answer.step.data[0] ^ 1]) + answer.step.data[1:]
        return answer

    once = SequenceManagerConfig(max_retries=0)
    with FakeSwarm(folder, "0:6", tamper=damage, config=once) as swarm, pytest.raises(Corrupted, match="checksum"):
        swarm.model.generate(PROMPT, max_new_tokens=4)


def test_blocked_servers_are_not_used(folder: Path) -> None:
    with FakeSwarm(folder, "0:6", "0:6") as swarm:
        blocked = swarm.records[0].server_id
        swarm.connection.config = SequenceManagerConfig(blocked_servers=(blocked,))
        swarm.model.generate(PROMPT, max_new_tokens=2)
        assert swarm.servers[0].frames == []
        assert swarm.servers[1].frames[0] == "open"
