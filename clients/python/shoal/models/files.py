"""The files of a model, wherever they come from: a folder of this machine, or (`shoal.models.hub`) the hub.

A checkpoint asks for files by name just before it reads them, so only those that are needed are ever fetched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from shoal.wire.errors import Corrupted, NotFound

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
# What transformers' tokenizers may be stored in. Which ones a model has differs.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Where a model of the hub is fetched from, and how. Ignored for folders, but for the revision.

    Attributes:
        revision: branch, tag or commit; None is the repository's default branch.
        token: for private repositories; None takes HF_TOKEN or the login of `hf auth login`.
        cache_dir: None is the hub client's own cache, which other programs use too.
        endpoint: URL of the hub; None is HF_ENDPOINT or the public one.
        parallel: most files to fetch at a time.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    cache_dir: Path | None = None
    endpoint: str | None = None
    parallel: int = 4


class ModelFiles(Protocol):
    """Gives a model's files by name. Calls block; they are safe in any thread.

    Attributes:
        folder: where files lie once they are fetched.
        source: what the model is loaded from: the folder (a `Path`), or the id of a repository (a `str`).
        label: how messages name the model.
    """

    folder: Path
    source: str | Path
    label: str

    def has(self, file: str) -> bool:
        """Tell whether the model has this file, fetched or not, as far as can be known now.

        Raises:
            NotAuthenticated, NotPermitted, NotFound, Unavailable: what the hub said.
        """

    def first_like(self, pattern: str) -> str | None:
        """Return the first file that fits a pattern like `*.bin`, None if there is none. Raises as `has`."""

    def tensor_names(self, file: str) -> list[str]:
        """Return the names in a safetensors file, which need not be fetched for it.

        Raises:
            Corrupted: if it is none; and as `has`.
        """

    def fetch(self, wanted: Mapping[str, str]) -> None:
        """Make files present and intact. `wanted` says for each file what it is needed for, or nothing.

        Raises:
            NotFound: naming the file and what it is needed for.
            NotAuthenticated, NotPermitted, Unavailable, Exhausted: if the hub or the disk does not give it.
            Corrupted: if it came damaged, twice.
        """

    def stop(self) -> None:
        """End what `fetch` does in another thread; that call raises `Unavailable`. What has arrived is kept."""


class FolderFiles:
    """The files of a folder, used as they lie."""

    def __init__(self, folder: str | Path) -> None:
        """Raises NotFound if there is no such folder."""
        self.folder = Path(os.path.abspath(folder))
        if not self.folder.is_dir():
            raise NotFound(f"no model folder {self.folder}")
        self.source: str | Path = self.folder
        self.label = str(self.folder)

    def has(self, file: str) -> bool:
        """Tell whether the file is there."""
        return (self.folder / file).is_file()

    def first_like(self, pattern: str) -> str | None:
        """Return the first file that fits."""
        return next((file for file in sorted(os.listdir(self.folder)) if fnmatchcase(file, pattern)), None)

    def tensor_names(self, file: str) -> list[str]:
        """Read the head of the file."""
        return safetensors_names(self.folder / file, self.label)

    def fetch(self, wanted: Mapping[str, str]) -> None:
        """Check that the files are there."""
        for file, purpose in sorted(wanted.items()):
            if not self.has(file):
                what = f"; {purpose}" if purpose else ""
                raise NotFound(f"file {file} of {self.folder} is missing{what}; download the model again")

    def stop(self) -> None:
        """Do nothing: nothing takes long here."""


def safetensors_names(file: Path, label: str) -> list[str]:
    """Return the names of the tensors in a safetensors file of the model `label`.

    Raises:
        Corrupted: if it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise Corrupted(f"file {file.name} of {label} cannot be read: {error}") from error


def fetch_tokenizer(files: ModelFiles) -> Path:
    """Fetch those tokenizer files that the model has and return the folder where they lie.

    Raises:
        NotFound: if it has none; and as `ModelFiles.fetch`.
    """
    found = [file for file in TOKENIZER_FILES if files.has(file)]
    if not found:
        raise NotFound(f"{files.label} has no tokenizer; pass ids, or add tokenizer.json to the model")
    files.fetch(dict.fromkeys(found, ""))
    return files.folder
