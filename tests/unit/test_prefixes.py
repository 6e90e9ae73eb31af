"""Names of models in a swarm: the rules of the hub, folders, and the override."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.models.prefixes import model_prefix, repository_prefix
from shoal.wire.errors import InvalidRequest


@pytest.mark.parametrize(
    ("repository", "model_type", "prefix"),
    [
        ("anyone/llama-65b", "llama", "llama-65b-hf"),
        ("anyone/llama-65b-hf", "llama", "llama-65b-hf"),
        ("enoch/llama-65b-hf", "llama", "llama-65b-hf"),
        ("llama-65b-hf", "llama", "llama-65b-hf"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama", "Meta-Llama-3-1-70B-Instruct-hf"),
        ("bigscience/bloom", "bloom", "bigscience/bloom-petals"),
        ("bigscience/bloomz", "bloom", "bigscience/bloomz-petals"),
        ("someone/bloom-7b1.5", "bloom", "someone/bloom-7b1-5-petals"),
        ("tiiuae/falcon-40b", "falcon", "falcon-40b"),
        ("Qwen/Qwen2.5-7B", "qwen2", "Qwen2-5-7B"),
    ],
)
def test_rule_of_the_family(repository: str, model_type: str, prefix: str) -> None:
    assert repository_prefix(repository, model_type) == prefix
    assert model_prefix(repository, SimpleNamespace(model_type=model_type)) == prefix


@pytest.mark.parametrize("repository", ["", "/", "a/", "/b", "a/b/c", "a//b"])
def test_what_is_no_repository_is_refused(repository: str) -> None:
    with pytest.raises(InvalidRequest):
        repository_prefix(repository, "llama")


@pytest.mark.parametrize("source", ["bigscience/bloom", Path("/models/bloom-1.5")])
def test_config_and_argument_override_every_rule(source: str | Path) -> None:
    config = SimpleNamespace(model_type="bloom", dht_prefix="my.own/name")
    assert model_prefix(source, config) == "my.own/name"
    assert model_prefix(source, config, "mine") == "mine"


def test_a_folder_keeps_its_name() -> None:
    config = SimpleNamespace(model_type="llama", dht_prefix=None)
    assert model_prefix(Path("/models/SmolLM2-135M.Instruct"), config) == "SmolLM2-135M.Instruct"
