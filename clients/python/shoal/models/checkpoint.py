"""Reads chosen tensors from a folder of safetensors shards, and nothing else of it.

Names are always those of transformers' causal language model, whatever prefix the files use. Pickle weights
are never read. A tensor or shard that is missing is an error that names it; nothing is ever filled in.
"""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shoal.models.families import Family, check_model_type, describe
from shoal.swarm.spans import Span
from shoal.wire.errors import Corrupted, InvalidRequest, NotFound, Unsupported

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class Checkpoint:
    """A model folder. `names` maps each stored tensor to its file; `opened` has the names of tensors read."""

    def __init__(self, folder: Path, family: Family, stored: Mapping[str, tuple[str, Path]]) -> None:
        self.folder = folder
        self.family = family
        self.config: Any = family.config
        self.names: Mapping[str, Path] = MappingProxyType({name: file for name, (_, file) in stored.items()})
        self.opened: set[str] = set()
        self._stored = stored

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read config and index of a folder; no tensor yet.

        Raises:
            NotFound: if the folder, its config or its weights are not there.
            Unsupported: for a model family or option that is not supported, or weights that are only pickles.
            InvalidRequest: if config or index cannot be read.
        """
        folder = Path(folder).absolute()
        if not folder.is_dir():
            raise NotFound(f"no model folder {folder}")
        family = describe(load_config(folder))
        stored = {canonical_name(family, name): (name, folder / file) for name, file in _stored_names(folder).items()}
        return cls(folder, family, stored)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read tensors as they are stored.

        Raises:
            NotFound: naming every tensor that the folder does not list, or whose file is not there.
            Corrupted: if a file is not what its index says, or is cut short.
        """
        wanted = list(dict.fromkeys(names))
        by_file = self._locate(wanted)
        tensors: dict[str, torch.Tensor] = {}
        for file, names_in_file in sorted(by_file.items()):
            tensors.update(self._read_file(file, names_in_file))
        return {name: tensors[name] for name in wanted}

    def read_ends(self) -> dict[str, torch.Tensor]:
        """Read embeddings, final norm and head. Tied models get the one stored matrix under both names.

        Raises:
            NotFound, Corrupted: as `read`.
        """
        names = end_names(self.family)
        row = self.family.row
        if not self.family.tied:
            return self.read(names)
        stored = row.embedding if row.embedding in self.names or row.head not in self.names else row.head
        ends = self.read([stored, *row.other_ends])
        ends[row.embedding] = ends[row.head] = ends[stored]
        return {name: ends[name] for name in names}

    def files_of(self, names: Iterable[str]) -> set[Path]:
        """Return the files that hold the tensors.

        Raises:
            NotFound: as `read`.
        """
        return set(self._locate(list(names)))

    def _locate(self, names: list[str]) -> dict[Path, list[str]]:
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise NotFound(f"{self.folder} has no tensor {_some(unknown)}; download the model again")
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.names[name]].append(name)
        for file, names_in_file in sorted(by_file.items()):
            if not file.is_file():
                raise NotFound(
                    f"file {file.name} of {self.folder} is missing; it holds {_some(names_in_file)}; "
                    "download the model again"
                )
        return dict(by_file)

    def _read_file(self, file: Path, names: list[str]) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError, safe_open

        tensors = {}
        try:
            with safe_open(file, framework="pt") as opened:
                for name in names:
                    tensors[name] = opened.get_tensor(self._stored[name][0])
                    self.opened.add(name)
        except SafetensorError as error:
            raise Corrupted(f"file {file.name} of {self.folder} cannot be read for {_some(names)}: {error}") from error
        return tensors


def load_config(folder: Path) -> Any:
    """Load transformers' config object of a model folder, its family checked first.

    Raises:
        NotFound: if there is no `config.json`.
        InvalidRequest: if it cannot be read.
        Unsupported: if the family is not supported.
    """
    fields = _read_json(folder / "config.json")
    check_model_type(fields.get("model_type"))
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, OSError) as error:
        raise InvalidRequest(f"{folder / 'config.json'} is not a usable config: {error}") from error


def canonical_name(family: Family, stored: str) -> str:
    """Return the name that transformers' causal language model uses for a stored tensor.

    Checkpoints of the bare model leave out the base prefix (`h.0...` for `transformer.h.0...`).
    """
    row = family.row
    return stored if stored.startswith(row.base_prefix) or stored == row.head else row.base_prefix + stored


def span_names(family: Family, span: Span) -> list[str]:
    """Return the names of all tensors of the blocks of `span`, in block order, sorted within a block."""
    own = sorted(block_layout(family))
    return [family.block_prefix(block) + name for block in span.blocks() for name in own]


def end_names(family: Family) -> list[str]:
    """Return the names of the tensors outside the blocks: embeddings, what follows them, final norm, head."""
    return [family.row.embedding, *family.row.other_ends, family.row.head]


def block_layout(family: Family) -> dict[str, tuple[int, ...]]:
    """Return name (without the block's prefix) and shape of each tensor that one block needs."""
    import torch

    with torch.device("meta"):
        layer = load_class(family.row.layer_class)(family.config, layer_idx=0)
    return {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}


def load_class(path: str) -> Any:
    """Import a class by its dotted path from the family table."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _stored_names(folder: Path) -> dict[str, str]:
    if (folder / INDEX_FILE).is_file():
        weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise InvalidRequest(f"{folder / INDEX_FILE} has no usable weight_map")
        return weight_map
    if (folder / SINGLE_FILE).is_file():
        return dict.fromkeys(_names_in(folder / SINGLE_FILE), SINGLE_FILE)
    if next(folder.glob("*.bin"), None) is not None:
        raise Unsupported(f"{folder} holds pickle weights (*.bin), which are not read; convert them to safetensors")
    raise NotFound(f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}")


def _names_in(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise Corrupted(f"file {file.name} of {file.parent} cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise NotFound(f"no file {file}")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{file} is not a JSON object")
    return fields


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
