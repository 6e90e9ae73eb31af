"""Families, checkpoints and identities: refusals by name, missing shards, tied ends, digests and hashes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, GPT2Config, LlamaConfig

from services.block_server.weights.span_model import load_span
from shoal.models.checkpoint import Checkpoint, end_names, span_names
from shoal.models.families import check_model_type, describe
from shoal.models.identity import block_hashes, config_digest, dtype_of, model_key, numeric_class_of
from shoal.swarm.spans import Span
from shoal.wire.errors import Corrupted, InvalidRequest, NotFound, SpanMismatch, Unsupported
from tests.support.tiny_models import load_reference, make_tiny

CPU = torch.device("cpu")


def test_sizes_come_from_the_config() -> None:
    llama = describe(LlamaConfig(num_attention_heads=8, num_key_value_heads=2, hidden_size=64))
    assert (llama.heads, llama.kv_heads, llama.head_dim, llama.max_positions) == (8, 2, 8, 2048)
    bloom = describe(BloomConfig(n_head=4, n_layer=3, hidden_size=32))
    assert (bloom.num_blocks, bloom.kv_heads, bloom.head_dim, bloom.max_positions) == (3, 4, 8, None)
    assert bloom.block_prefix(2) == "transformer.h.2."


def test_other_families_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"'gpt2'.*llama, bloom"):
        describe(GPT2Config())
    with pytest.raises(Unsupported, match="'made_up'"):
        check_model_type("made_up")


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "rope_type='dynamic'",
        ),
        (LlamaConfig(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (LlamaConfig(is_encoder_decoder=True), "is_encoder_decoder"),
        (BloomConfig(slow_but_exact=True), "slow_but_exact=True"),
        # KV-12: of caches that keep less than all tokens, no layer may be cut as if it kept them.
        (LlamaConfig(sliding_window=8), "sliding_window"),
        (LlamaConfig(attention_chunk_size=8), "attention_chunk_size"),
        (LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]), "'sliding_attention'"),
    ],
)
def test_options_that_are_not_honoured_are_refused_by_name(config: object, option: str) -> None:
    with pytest.raises(Unsupported, match=option):
        describe(config)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen2", "llama4_text"])
def test_kv12_families_with_windows_are_refused_before_a_weight_is_read(kind: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "model_type": kind, "sliding_window": 8}))
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(Unsupported, match=kind):
        Checkpoint.open(folder)


def test_kv12_a_llama_with_a_window_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", sliding_window=8)
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(Unsupported, match="sliding_window"):
        Checkpoint.open(folder)


def test_options_that_say_what_is_so_anyhow_are_harmless() -> None:
    config = LlamaConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2, sliding_window=None)
    assert describe(config).num_blocks == 2


def test_an_unsupported_family_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "model_type": "mamba"}))
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(Unsupported, match="'mamba'"):
        Checkpoint.open(folder)


def test_folders_that_are_no_model_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no model folder"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(NotFound, match=r"config\.json"):
        Checkpoint.open(tmp_path)
    folder = make_tiny(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"model\.safetensors"):
        Checkpoint.open(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(InvalidRequest, match="not JSON"):
        Checkpoint.open(folder)


def test_pickle_weights_are_never_read(tmp_path: Path) -> None:
    """SE-02: the bomb would leave a file behind."""
    folder = make_tiny(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(canary),)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(Unsupported, match="pickle"):
        Checkpoint.open(folder)
    assert not canary.exists()


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_missing_shard_stops_only_servers_that_need_it(family: str, tmp_path: Path) -> None:
    """ML-01: shard 2 of 3 holds blocks 2 and 3."""
    folder = make_tiny(tmp_path / "model", family, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(NotFound, match=r"model-00002-of-00003\.safetensors.*\.2\.") as error:
        load_span(checkpoint, Span(1, 3), torch.float32, CPU)
    assert "download" in str(error.value)
    assert checkpoint.opened == set()
    for span in (Span(0, 2), Span(4, 6)):
        load_span(checkpoint, span, torch.float32, CPU)
    assert checkpoint.opened == set(
        span_names(checkpoint.family, Span(0, 2)) + span_names(checkpoint.family, Span(4, 6))
    )


def test_a_missing_tensor_is_named_and_never_invented(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, folder / "model.safetensors")
    with pytest.raises(NotFound, match=lost):
        load_span(Checkpoint.open(folder), Span(1, 2), torch.float32, CPU)


def test_damaged_files_and_wrong_shapes_are_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", shards=3)
    file = folder / "model-00001-of-00003.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Corrupted, match="model-00001"):
        load_span(Checkpoint.open(folder), Span(0, 1), torch.float32, CPU)
    tensors = load_file(folder / "model-00003-of-00003.safetensors")
    tensors["model.layers.5.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model-00003-of-00003.safetensors")
    with pytest.raises(Corrupted, match=r"layers\.5\.mlp\.up_proj.*shape"):
        load_span(Checkpoint.open(folder), Span(5, 6), torch.float32, CPU)
    with pytest.raises(SpanMismatch, match="has 6"):
        load_span(Checkpoint.open(folder), Span(5, 7), torch.float32, CPU)


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("stored_ends", ["embedding", "head", "both"])
def test_tied_ends_are_found_under_either_name(family: str, stored_ends: str, tmp_path: Path) -> None:
    """ML-02."""
    folder = make_tiny(tmp_path / "model", family, tied=True, stored_ends=stored_ends)  # type: ignore[arg-type]
    checkpoint = Checkpoint.open(folder)
    ends = checkpoint.read_ends()
    row = checkpoint.family.row
    assert list(ends) == end_names(checkpoint.family)
    assert ends[row.embedding] is ends[row.head]
    whole = make_tiny(tmp_path / "whole", family, tied=True)
    assert torch.equal(ends[row.head], load_reference(whole).state_dict()[row.head])
    assert not any(name.startswith(row.blocks_path + ".") for name in checkpoint.opened)


def test_untied_ends_stay_two_matrices(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", tied=False)
    ends = Checkpoint.open(folder).read_ends()
    assert not torch.equal(ends["model.embed_tokens.weight"], ends["lm_head.weight"])


def test_names_without_the_base_prefix_are_understood(tmp_path: Path) -> None:
    """BLOOM's published checkpoints leave it out."""
    folder = make_tiny(tmp_path / "model", "bloom", tied=True)
    expected = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in expected.items()}, folder / "model.safetensors"
    )
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.names) == set(expected)
    name = "transformer.h.3.mlp.dense_h_to_4h.weight"
    assert torch.equal(checkpoint.read([name])[name], expected[name])


def test_an_index_cannot_point_outside_the_folder(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", shards=2)
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["lm_head.weight"] = "../other.safetensors"
    index.write_text(json.dumps(fields))
    with pytest.raises(InvalidRequest, match="weight_map"):
        Checkpoint.open(folder)


def test_the_digest_follows_the_fields_that_change_numbers_only() -> None:
    base = LlamaConfig()
    assert len(config_digest(base)) == 32
    assert config_digest(LlamaConfig(bos_token_id=7, use_cache=False)) == config_digest(base)
    assert config_digest(LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 10000})) == config_digest(
        LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    )
    changed = [
        LlamaConfig(rms_norm_eps=1e-5),
        LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        LlamaConfig(tie_word_embeddings=True),
        LlamaConfig(hidden_act="gelu"),
        LlamaConfig(num_hidden_layers=31),
    ]
    assert len({config_digest(config) for config in [base, *changed]}) == 1 + len(changed)
    assert config_digest(BloomConfig()) != config_digest(base)


def test_block_hashes_do_not_depend_on_how_files_are_cut(tmp_path: Path) -> None:
    one = Checkpoint.open(make_tiny(tmp_path / "one"))
    three = Checkpoint.open(make_tiny(tmp_path / "three", shards=3))
    span = Span(0, 6)
    hashes = block_hashes(one, one.family, span)
    assert hashes == block_hashes(three, three.family, span)
    assert len(set(hashes)) == 6
    assert hashes[2:4] == block_hashes(three, three.family, Span(2, 4))
    other = Checkpoint.open(make_tiny(tmp_path / "other", seed=5))
    assert not set(hashes) & set(block_hashes(other, other.family, span))


def test_cached_hashes_are_taken_until_a_file_changes(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", shards=3)
    cache = tmp_path / "cache" / "hashes.json"
    first = Checkpoint.open(folder)
    hashes = block_hashes(first, first.family, Span(0, 4), cache)
    again = Checkpoint.open(folder)
    assert block_hashes(again, again.family, Span(0, 4), cache) == hashes
    assert again.opened == set()
    shutil.copy(make_tiny(tmp_path / "other", shards=3, seed=9) / "model-00001-of-00003.safetensors", folder)
    changed = Checkpoint.open(folder)
    assert block_hashes(changed, changed.family, Span(0, 4), cache)[0] != hashes[0]
    assert changed.opened == set(span_names(changed.family, Span(0, 2)))
    cache.write_text("{ broken")
    damaged = Checkpoint.open(folder)
    assert block_hashes(damaged, damaged.family, Span(2, 4), cache) == hashes[2:4]


def test_model_keys_and_numeric_classes(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "Tiny-1")
    key = model_key(folder, "fp32")
    assert key.prefix == "Tiny-1"
    assert key == model_key(Checkpoint.open(folder), "fp32", "Tiny-1")
    assert [numeric_class_of(dtype_of(name)) for name in ("fp32", "bf16", "fp16")] == ["fp32", "bf16", "fp16"]
    with pytest.raises(Unsupported, match="int8"):
        dtype_of("int8")
    with pytest.raises(Unsupported, match="float64"):
        numeric_class_of(torch.float64)
