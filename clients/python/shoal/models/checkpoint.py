"""Reads chosen tensors of a model's safetensors shards, and nothing else of it.

Names are always those of transformers' causal language model, whatever prefix the files use. Files come from a folder
or from the hub, only when they are needed. Pickles are read only for those who opted in. A tensor or shard that is
missing is an error that names it; nothing is ever filled in.
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
from shoal.models.files import CONFIG_FILE, FolderFiles, ModelFiles
from shoal.models.pickles import read_pickle
from shoal.swarm.spans import Span
from shoal.wire.errors import Corrupted, InvalidRequest, NotFound, Unsupported

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_INDEX_FILE = "pytorch_model.bin.index.json"
PICKLE_SINGLE_FILE = "pytorch_model.bin"


class Checkpoint:
    """A model's weights. `names` maps each stored tensor to its file; `opened` has the names of tensors read."""

    def __init__(self, files: ModelFiles, family: Family, stored: Mapping[str, tuple[str, str]]) -> None:
        """`stored` has, for each of our names, the name in the file and the file."""
        self.files = files
        self.folder = files.folder
        self.family = family
        self.config: Any = family.config
        self.names: Mapping[str, Path] = MappingProxyType(
            {name: files.folder / file for name, (_, file) in stored.items()}
        )
        self.opened: set[str] = set()
        self._stored = stored

    @property
    def source(self) -> str | Path:
        """What the model is loaded from: the folder (a `Path`), or the id of a repository (a `str`)."""
        return self.files.source

    @classmethod
    def open(cls, source: str | Path | ModelFiles, *, allow_pickle: bool = False) -> Checkpoint:
        """Read config and index of a folder, or of files from elsewhere; no tensor yet.

        Raises:
            NotFound: if the folder, its config or its weights are not there.
            Unsupported: for a model family or option that is not supported, before anything else is fetched, or for
                weights that are only pickles, unless `allow_pickle`.
            InvalidRequest: if config or index cannot be read.
            ShoalError: as `ModelFiles.fetch`.
        """
        files = FolderFiles(source) if isinstance(source, str | Path) else source
        files.fetch({CONFIG_FILE: ""})
        family = describe(load_config(files.folder))
        stored = _stored_names(files, allow_pickle=allow_pickle)
        return cls(files, family, {canonical_name(family, name): (name, file) for name, file in stored.items()})

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read tensors as they are stored.

        Raises:
            NotFound: naming every tensor that the model does not list, or whose file is not there.
            Corrupted: if a file is not what its index says, or is cut short.
            ShoalError: as `ModelFiles.fetch`.
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
        """Make the files that hold the tensors present, and return them.

        Raises:
            NotFound, ShoalError: as `read`.
        """
        return {self.folder / file for file in self._locate(list(names))}

    def _locate(self, names: list[str]) -> dict[str, list[str]]:
        """Return the tensors to take from each file, after fetching the files."""
        unknown = [name for name in names if name not in self._stored]
        if unknown:
            raise NotFound(f"{self.files.label} has no tensor {_some(unknown)}; download it again or use another model")
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_file[self._stored[name][1]].append(name)
        self.files.fetch({file: f"it holds {_some(held)}" for file, held in by_file.items()})
        return dict(by_file)

    def _read_file(self, file: str, names: list[str]) -> dict[str, torch.Tensor]:
        path = self.folder / file
        if path.suffix == ".bin":
            tensors = self._read_pickle(path, names)
        else:
            tensors = self._read_safetensors(path, names)
        self.opened.update(names)
        return tensors

    def _read_safetensors(self, path: Path, names: list[str]) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as opened:
                return {name: opened.get_tensor(self._stored[name][0]) for name in names}
        except SafetensorError as error:
            where = f"file {path.name} of {self.files.label}"
            raise Corrupted(f"{where} cannot be read for {_some(names)}: {error}") from error

    def _read_pickle(self, path: Path, names: list[str]) -> dict[str, torch.Tensor]:
        found = read_pickle(path, self.files.label)
        missing = [name for name in names if self._stored[name][0] not in found]
        if missing:
            raise Corrupted(f"file {path.name} of {self.files.label} does not hold {_some(missing)}")
        return {name: found[self._stored[name][0]] for name in names}


def load_config(folder: Path) -> Any:
    """Load transformers' config object of a model folder, its family checked first.

    Raises:
        NotFound: if there is no `config.json`.
        InvalidRequest: if it cannot be read.
        Unsupported: if the family is not supported.
    """
    fields = _read_json(folder / CONFIG_FILE)
    check_model_type(fields.get("model_type"))
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, AttributeError, OSError) as error:
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


def _stored_names(files: ModelFiles, *, allow_pickle: bool) -> dict[str, str]:
    """Return the file of each tensor, by the name that the files use."""
    if files.has(INDEX_FILE):
        return _read_index(files, INDEX_FILE)
    if files.has(SINGLE_FILE):
        return dict.fromkeys(files.tensor_names(SINGLE_FILE), SINGLE_FILE)
    pickled = files.first_like("*.bin") or files.first_like("*.pt") or files.first_like("*.pth")
    if pickled is None:
        raise NotFound(f"{files.label} has neither {INDEX_FILE} nor {SINGLE_FILE}")
    if not allow_pickle:
        raise Unsupported(
            f"{files.label} holds pickle weights only ({pickled}), which can run code and are not read; convert them "
            "to safetensors, or allow them with --allow-pickle (allow_pickle=True in Python)"
        )
    if files.has(PICKLE_INDEX_FILE):
        return _read_index(files, PICKLE_INDEX_FILE)
    files.fetch({PICKLE_SINGLE_FILE: ""})
    return dict.fromkeys(read_pickle(files.folder / PICKLE_SINGLE_FILE, files.label), PICKLE_SINGLE_FILE)


def _read_index(files: ModelFiles, index: str) -> dict[str, str]:
    files.fetch({index: ""})
    weight_map = _read_json(files.folder / index).get("weight_map")
    suffix = ".bin" if index == PICKLE_INDEX_FILE else ".safetensors"
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file and file.endswith(suffix) for file in weight_map.values()
    ):
        raise InvalidRequest(f"{files.folder / index} has no usable weight_map")
    return weight_map


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
