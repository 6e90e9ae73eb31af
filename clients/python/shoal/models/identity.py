"""Who a model is: a digest of the config fields that change numbers, and a content hash for each block.

Nobody holds a whole model, so two servers agree block by block. Hashes cover the tensors as stored and do not
depend on the format that a server computes in.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.models.checkpoint import Checkpoint, span_names
from shoal.models.families import Family, describe
from shoal.models.hash_cache import HashCache, file_key
from shoal.models.prefixes import model_prefix
from shoal.swarm.snapshot import ModelKey
from shoal.swarm.spans import Span
from shoal.wire.errors import Unsupported

if TYPE_CHECKING:
    import torch


def config_digest(config: Any) -> bytes:
    """Return the SHA-256 (32 bytes) over the config fields that change numbers.

    Raises:
        Unsupported: if the family is not supported.
    """
    row = describe(config).row
    fields = {name: _plain(getattr(config, name, None)) for name in row.numeric_fields}
    text = json.dumps({"model_type": row.model_type, **fields}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def numeric_class_of(dtype: torch.dtype) -> str:
    """Name the numeric class of an element type: `fp32`, `bf16` or `fp16`.

    Raises:
        Unsupported: for any other type.
    """
    names = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    if str(dtype) not in names:
        raise Unsupported(f"{dtype} is not supported; use {', '.join(names)}")
    return names[str(dtype)]


def dtype_of(numeric_class: str) -> torch.dtype:
    """Return the element type of a numeric class.

    Raises:
        Unsupported: for an unknown class.
    """
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if numeric_class not in dtypes:
        raise Unsupported(f"numeric class {numeric_class!r} is not supported; use {', '.join(dtypes)}")
    return dtypes[numeric_class]


def model_key(model: Checkpoint | Path | str, numeric_class: str, prefix: str | None = None) -> ModelKey:
    """Return the identity of a model: an open checkpoint or a folder. It does not depend on where weights come from.

    `prefix` is the model's name in the swarm; by default as `shoal.models.prefixes.model_prefix` has it.

    Raises:
        Unsupported, NotFound, InvalidRequest: as `Checkpoint.open`.
    """
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    name = model_prefix(checkpoint.source, checkpoint.config, prefix or "")
    return ModelKey(name, config_digest(checkpoint.config), numeric_class)


def block_hashes(checkpoint: Checkpoint, family: Family, span: Span, cache_file: Path | None = None) -> list[bytes]:
    """Return the SHA-256 of each block of `span`: tensors in name order, each name, type, shape and bytes.

    With `cache_file`, hashes found there are taken if no file of the block changed in path, size or time.

    Raises:
        NotFound, Corrupted: as `Checkpoint.read`.
    """
    cache = HashCache(cache_file)
    cached = cache.load()
    hashes, fresh = [], {}
    for block in span.blocks():
        names = span_names(family, Span(block, block + 1))
        key = file_key(checkpoint.files_of(names), *names)
        digest = bytes.fromhex(cached[key]) if key in cached else _hash_block(checkpoint, family, block, names)
        fresh[key] = digest.hex()
        hashes.append(digest)
    cache.add(fresh)
    return hashes


def _hash_block(checkpoint: Checkpoint, family: Family, block: int, names: list[str]) -> bytes:
    import torch

    digest = hashlib.sha256()
    for name, tensor in checkpoint.read(names).items():
        own = name.removeprefix(family.block_prefix(block))
        digest.update(json.dumps([own, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _plain(value: Any) -> Any:
    # 10000 and 10000.0 are the same number to a model, so they must be the same text here.
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    return repr(float(value))
