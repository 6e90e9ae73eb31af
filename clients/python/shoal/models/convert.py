"""Turns a GGUF file into a folder of safetensors, config and tokenizer that Shoal and transformers load.

The target appears whole or not at all, and a target that is there is left as it is. Quantised weights are
expanded to fp32; nothing is fetched from the network.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from shoal.wire.errors import AlreadyExists, InvalidRequest, NotFound

MAX_SHARD_SIZE = "200MB"


def convert_gguf(source: Path, target: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Convert the GGUF file `source` into the folder `target` and return the folder.

    Running it again does nothing. `progress` is called with one short line before each stage.

    Raises:
        NotFound: if `source` is not a file.
        InvalidRequest: if `source` is not a GGUF file.
        AlreadyExists: if `target` is there and is not a converted model.
    """
    tell = progress or (lambda _line: None)
    target = target.absolute()
    if (target / "config.json").is_file():
        tell(f"{target} is there already")
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise AlreadyExists(f"{target} exists and holds something else; name a new folder")
    _check_gguf(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert_into(source, staging, tell)
        if target.is_dir():
            target.rmdir()
        staging.chmod(0o755)
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    tell(f"wrote {target}")
    return target


def _check_gguf(source: Path) -> None:
    if not source.is_file():
        raise NotFound(f"no file {source}")
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise InvalidRequest(f"{source} is not a GGUF file")


def _convert_into(source: Path, folder: Path, tell: Callable[[str], None]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tell(f"reading {source.name}")
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    # The weights are dequantised now; with these left in place save_pretrained refuses the model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tell("writing weights")
    model.save_pretrained(str(folder), max_shard_size=MAX_SHARD_SIZE)
    tell("writing tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, local_files_only=True)
    tokenizer.save_pretrained(str(folder))
