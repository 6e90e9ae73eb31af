"""Reads weights stored as pickles, for those who opted in: through torch's weights-only loader, which runs no code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.wire.errors import Corrupted

if TYPE_CHECKING:
    import torch


def read_pickle(file: Path, label: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of the model `label`, mapped from disk where its format allows it.

    Raises:
        Corrupted: if it cannot be read, or holds anything that would run code.
    """
    import torch

    try:
        # The mapping works for torch's own format since 1.6 only, which is a zip archive.
        with file.open("rb") as opened:
            mapped = opened.read(2) == b"PK"
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    # Each kind of damage, and each forbidden object, is another class of exception in torch, some of them pickle's.
    except Exception as error:
        raise Corrupted(
            f"file {file.name} of {label} does not load as plain tensors; use a model with safetensors: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    if not isinstance(loaded, dict):
        raise Corrupted(f"file {file.name} of {label} holds no named tensors")
    return {str(name): tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}
