"""Which files of a repository are fetched, by whom, and at which commit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.block_server.loading import describe_server, open_checkpoint
from services.block_server.settings import BlockServerSettings
from services.block_server.weights.span_model import load_span
from shoal.client.auto import build_model
from shoal.client.connection import RemoteModel, SwarmConnection
from shoal.models.checkpoint import Checkpoint, end_names, span_names
from shoal.models.files import HubOptions, fetch_tokenizer
from shoal.models.identity import block_hashes, config_digest, model_key
from shoal.models.sources import open_model
from shoal.swarm.spans import Span
from shoal.wire.errors import InvalidRequest, NotFound, Unsupported
from tests.support.fake_hub import FakeHub
from tests.support.tiny_models import load_reference, make_tiny

NAME = "owner/tiny"
CPU = torch.device("cpu")
SMALL = {"config.json", "model.safetensors.index.json"}


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


def reshard(folder: Path, target: Path, shard_of_block: list[int]) -> Path:
    """Copy a model, its blocks cut into three shards as told; embeddings go to the first, norm and head to the last."""
    shutil.copytree(folder, target)
    tensors = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    where = {}
    for name in tensors:
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        where[name] = shard(shard_of_block[numbers[0]] if numbers else 1 if "embed" in name else 3)
    for file in set(where.values()):
        save_file({name: tensors[name] for name in where if where[name] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return target


class FakeConnection:
    """What building a model asks of a connection."""

    dtype = torch.float32

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model = RemoteModel(model_key(checkpoint, "fp32"), checkpoint.family, self.dtype)


def build(checkpoint: Checkpoint) -> Any:
    """Build the client's model without a swarm."""
    return build_model(checkpoint, cast(SwarmConnection, FakeConnection(checkpoint)))


def test_opening_a_model_fetches_no_weights(hub: FakeHub, options: HubOptions) -> None:
    checkpoint = open_model(NAME, options)
    assert hub.fetched() == SMALL
    assert (checkpoint.source, checkpoint.family.num_blocks) == (NAME, 6)


def test_a_server_fetches_only_the_shards_of_its_span(
    hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path
) -> None:
    """Blocks 1 and 2 lie in shards 1 and 3 here."""
    hub.push("owner/cut", reshard(folder, tmp_path / "cut", [1, 1, 3, 2, 2, 3]))
    settings = BlockServerSettings(model="owner/cut", cache_dir=options.cache_dir, state_dir=tmp_path)
    checkpoint = open_checkpoint(settings)
    facts = describe_server(settings, checkpoint, Span(1, 3), "server")
    load_span(checkpoint, Span(1, 3), torch.float32, CPU)
    assert hub.fetched() == SMALL | {shard(1), shard(3)}
    for number in (1, 3):
        assert hub.sent(shard(number)) == (tmp_path / "cut" / shard(number)).stat().st_size
    assert facts.model.prefix == "cut-hf"
    assert checkpoint.opened == set(span_names(checkpoint.family, Span(1, 3)))


def test_a_client_fetches_only_what_holds_the_ends(hub: FakeHub, options: HubOptions, folder: Path) -> None:
    checkpoint = open_model(NAME, options)
    model = build(checkpoint)
    assert hub.fetched() == SMALL | {"generation_config.json", shard(1), shard(3)}
    assert model.generation_config.max_new_tokens == 7
    # ML-08: nothing of a block is there, not even empty.
    assert checkpoint.opened == set(end_names(checkpoint.family)) == {name for name, _ in model.named_parameters()}
    reference = load_reference(folder).state_dict()
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(model.state_dict()[name], reference[name])
    hub.forget()
    assert fetch_tokenizer(checkpoint.files) == checkpoint.folder
    assert hub.fetched() == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("stored_ends", ["embedding", "head", "both"])
def test_ml02_tied_ends_come_with_one_matrix(
    family: str, stored_ends: str, hub: FakeHub, options: HubOptions, tmp_path: Path
) -> None:
    local = make_tiny(tmp_path / "tied", family, tied=True, shards=3, stored_ends=stored_ends)  # type: ignore[arg-type]
    hub.push("owner/tied", local)
    checkpoint = open_model("owner/tied", options)
    model = build(checkpoint)
    assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)
    expected = Checkpoint.open(local).read_ends()[checkpoint.family.row.head]
    assert torch.equal(model.get_output_embeddings().weight, expected)
    assert shard(2) not in hub.fetched()


def test_identity_does_not_depend_on_where_weights_come_from(
    hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path
) -> None:
    from_hub, from_folder = open_model(NAME, options), open_model(folder)
    hashes = tmp_path / "hashes.json"
    span = Span(0, 6)
    assert block_hashes(from_hub, from_hub.family, span, hashes) == block_hashes(from_folder, from_folder.family, span)
    assert config_digest(from_hub.config) == config_digest(from_folder.config)
    # Only the default name follows the rules for repositories there, and is the folder's own name here.
    assert (model_key(from_hub, "fp32").prefix, model_key(from_folder, "fp32").prefix) == ("tiny-hf", "tiny")
    assert model_key(from_hub, "fp32", "named") == model_key(from_folder, "fp32", "named")
    again = open_model(NAME, options)
    assert block_hashes(again, again.family, span, hashes) == block_hashes(from_hub, from_hub.family, span)
    assert again.opened == set()


def test_a_family_that_is_not_supported_is_refused_before_any_weight(
    hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path
) -> None:
    """SE-06 as well: code that comes with a repository is not asked for."""
    other = shutil.copytree(folder, tmp_path / "other")
    fields = json.loads((other / "config.json").read_text())
    custom = {"AutoConfig": "configuration_other.OtherConfig"}
    (other / "config.json").write_text(json.dumps({**fields, "model_type": "other", "auto_map": custom}))
    (other / "configuration_other.py").write_text("raise SystemExit('ran')")
    hub.push("owner/other", other)
    with pytest.raises(Unsupported, match="'other' is not supported; supported are llama, bloom"):
        open_model("owner/other", options)
    assert hub.fetched() == {"config.json"}


def test_a_single_file_is_looked_into_before_it_is_fetched(hub: FakeHub, options: HubOptions, tmp_path: Path) -> None:
    local = make_tiny(tmp_path / "single")
    size = (local / "model.safetensors").stat().st_size
    hub.push("owner/single", local)
    checkpoint = open_model("owner/single", options)
    assert len(checkpoint.names) == len(load_file(local / "model.safetensors"))
    assert not (checkpoint.folder / "model.safetensors").exists()
    hub.forget()
    load_span(checkpoint, Span(2, 4), torch.float32, CPU)
    assert hub.sent("model.safetensors") == size
    hub.forget()
    load_span(open_model("owner/single", options), Span(0, 6), torch.float32, CPU)
    assert hub.fetched() == set()


def test_a_revision_is_pinned_while_its_branch_moves(
    hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path
) -> None:
    """ML-03: one server never mixes two commits, and a commit can be asked for by its hash."""
    first = hub.repos[NAME].refs["main"]
    checkpoint = open_model(NAME, options)
    assert checkpoint.folder.name == first
    second = hub.push(NAME, make_tiny(tmp_path / "second", shards=3, seed=9))
    old = load_file(folder / shard(1))["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(checkpoint.read(["model.layers.0.mlp.up_proj.weight"]).popitem()[1], old)
    moved = open_model(NAME, options)
    assert moved.folder.name == second
    assert not torch.equal(moved.read(["model.layers.0.mlp.up_proj.weight"]).popitem()[1], old)
    for revision in (first, "v1"):
        hub.repos[NAME].refs["v1"] = first
        assert open_model(NAME, replace(options, revision=revision)).folder.name == first
    one, two = (block_hashes(found, found.family, Span(0, 1)) for found in (checkpoint, moved))
    assert one != two


def test_a_folder_wins_over_a_hub_id(
    hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "owner" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert open_model(NAME, options).folder == tmp_path / "owner" / "tiny"
    assert hub.hits == []
    with pytest.raises(InvalidRequest, match="revision 'v1' asked for, but owner/tiny is a folder"):
        open_model(NAME, replace(options, revision="v1"))


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "file:///etc/passwd",
        "tiny",
        "a/b/c",
        "o/" + "x" * 200,
        "о/tiny",
        "owner/..",
        "owner/a--b",
        "",
    ],
)
def test_se06_names_of_another_form_never_reach_the_hub(name: str, hub: FakeHub, options: HubOptions) -> None:
    with pytest.raises((NotFound, InvalidRequest), match=r"no model folder|no model of the hub"):
        open_model(name, options)
    assert hub.hits == []


@pytest.mark.parametrize("revision", ["../../../main", "a//b", "-x", "a b", "x" * 300])
def test_se06_revisions_of_another_form_never_reach_the_hub(revision: str, hub: FakeHub, options: HubOptions) -> None:
    with pytest.raises(InvalidRequest, match="no branch, tag or commit"):
        open_model(NAME, replace(options, revision=revision))
    assert hub.hits == []


def test_an_index_cannot_point_outside_the_repository(
    hub: FakeHub, options: HubOptions, folder: Path, tmp_path: Path
) -> None:
    bad = shutil.copytree(folder, tmp_path / "bad")
    index = {"weight_map": {"lm_head.weight": "../../../secret.safetensors"}}
    (bad / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.push("owner/bad", bad)
    with pytest.raises(InvalidRequest, match="weight_map"):
        open_model("owner/bad", options)
