"""What a model is called in a swarm: the prefix under which its servers announce themselves. Pure.

A name is only a name: two models with one prefix never mix, as the config digest is part of a model's identity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.wire.errors import InvalidRequest

# Families whose repositories are known under two names, with and without `-hf`.
LLAMA_LIKE = frozenset({"llama"})
BLOOM = "bloom"


def repository_prefix(repository: str, model_type: str) -> str:
    """Return the default prefix of a repository of the hub, `owner/name` or `name`.

    BLOOM: the whole id and `-petals`, so `bigscience/bloom` is `bigscience/bloom-petals`. Llama-like families: the
    last component, with `-hf` behind it unless it is there, so the copies `llama-65b` of any owner are all
    `llama-65b-hf`. Other families: the last component. Dots become dashes: they separate the parts of DHT keys.

    Raises:
        InvalidRequest: if the id has an empty component, or more than two.
    """
    parts = repository.split("/")
    if not 1 <= len(parts) <= 2 or not all(parts):
        raise InvalidRequest(f"expected a repository such as OWNER/NAME, got {repository!r}")
    dashed = repository.replace(".", "-")
    if model_type == BLOOM:
        return f"{dashed}-petals"
    name = dashed.rpartition("/")[2]
    if model_type in LLAMA_LIKE and not name.endswith("-hf"):
        return f"{name}-hf"
    return name


def model_prefix(source: str | Path, config: Any, override: str = "") -> str:
    """Return the prefix of a model: `override`, else `config.dht_prefix`, else the default of its source.

    `source` is the folder (a `Path`) or the repository id (a `str`) that the model is loaded from. The default of
    a folder is its name as it is: whoever made the folder chose it, and the rules of the hub do not apply.
    """
    wanted = override or getattr(config, "dht_prefix", None)
    if wanted:
        return str(wanted)
    if isinstance(source, Path):
        return source.name
    return repository_prefix(source, str(getattr(config, "model_type", "")))
