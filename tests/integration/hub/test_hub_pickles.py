"""SE-02: pickles of the hub are refused by name; for those who opted in they are read by a loader that runs no code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.models.checkpoint import span_names
from shoal.models.files import HubOptions
from shoal.models.identity import block_hashes
from shoal.models.sources import open_model
from shoal.swarm.spans import Span
from shoal.wire.errors import Corrupted, Unsupported
from tests.support.fake_hub import FakeHub

SPAN = Span(2, 4)


def pickled(folder: Path, target: Path, *, shards: bool) -> Path:
    """Copy a model, its weights as pickles of the same cut, or in one file."""
    shutil.copytree(folder, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    names = {
        name: file.replace("model-", "pytorch_model-").replace("safetensors", "bin") for name, file in index.items()
    }
    tensors = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in target.glob("model*"):
        file.unlink()
    if not shards:
        torch.save(tensors, target / "pytorch_model.bin")
        return target
    for file in set(names.values()):
        torch.save({name: tensors[name] for name in names if names[name] == file}, target / file)
    (target / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    return target


@pytest.mark.parametrize("shards", [True, False])
def test_pickles_are_refused_by_name_before_any_is_fetched(
    shards: bool, hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path
) -> None:
    hub.push("owner/old", pickled(folder, tmp_path / "old", shards=shards))
    with pytest.raises(
        Unsupported, match=r"owner/old at .* pickle weights only \(pytorch_model.*\.bin\).*--allow-pickle"
    ):
        open_model("owner/old", options)
    assert hub.fetched() == {"config.json"}


@pytest.mark.parametrize("shards", [True, False])
def test_those_who_opt_in_get_the_same_tensors(
    shards: bool, hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path
) -> None:
    hub.push("owner/old", pickled(folder, tmp_path / "old", shards=shards))
    old, new = open_model("owner/old", options, allow_pickle=True), open_model(folder)
    assert block_hashes(old, old.family, SPAN) == block_hashes(new, new.family, SPAN)
    ends = new.read_ends()
    assert all(torch.equal(tensor, ends[name]) for name, tensor in old.read_ends().items())
    if shards:
        again = open_model("owner/old", HubOptions(cache_dir=tmp_path / "again"), allow_pickle=True)
        hub.forget()
        again.read(span_names(again.family, SPAN))
        assert hub.fetched() == {"pytorch_model-00002-of-00003.bin"}


def test_a_bomb_is_an_error_and_does_not_go_off(
    hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(canary),)

    old = pickled(folder, tmp_path / "old", shards=False)
    torch.save({"model.norm.weight": Bomb()}, old / "pytorch_model.bin")
    hub.push("owner/bomb", old)
    with pytest.raises(Corrupted, match=r"pytorch_model\.bin of owner/bomb at .* does not load as plain tensors"):
        open_model("owner/bomb", options, allow_pickle=True)
    (old / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    hub.push("owner/bomb", old)
    with pytest.raises(Corrupted, match="does not load as plain tensors"):
        open_model("owner/bomb", options, allow_pickle=True)
    assert not canary.exists()
