"""Finds a model by what a person calls it: a folder of this machine, or OWNER/NAME on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shoal.models.checkpoint import Checkpoint
from shoal.models.files import FolderFiles, HubOptions, ModelFiles
from shoal.wire.errors import InvalidRequest, NotAuthenticated, NotFound, Unavailable

# ASCII only: letters of other scripts that look alike would name another repository.
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")


def open_model(
    model: str | os.PathLike[str], options: HubOptions | None = None, *, allow_pickle: bool = False
) -> Checkpoint:
    """Open a model; no weights are read or fetched yet.

    Raises:
        NotFound, InvalidRequest: as `find_files`; others as `Checkpoint.open`.
    """
    return Checkpoint.open(find_files(model, options), allow_pickle=allow_pickle)


def find_files(model: str | os.PathLike[str], options: HubOptions | None = None) -> ModelFiles:
    """Return the files of a model. A folder wins over a hub id; a `Path` is always a folder.

    Raises:
        InvalidRequest: if a revision is asked of a folder.
        NotFound: if it is neither a folder nor OWNER/NAME; and as `HubFiles.open`.
    """
    text = os.fspath(model)
    if os.path.isdir(text):
        if options is not None and options.revision:
            raise InvalidRequest(f"revision {options.revision!r} asked for, but {text} is a folder; leave it out")
        return FolderFiles(text)
    if isinstance(model, Path) or not is_hub_id(text):
        raise NotFound(
            f"there is no model folder {text}: pass a folder with config.json and safetensors (`shoal model convert` "
            "makes one from a GGUF file), or OWNER/NAME of the hub"
        )
    # The hub client takes a while to load, and only models of the hub need it.
    from shoal.models.hub import HubFiles

    try:
        return HubFiles.open(text, options or HubOptions())
    except (NotFound, NotAuthenticated, Unavailable) as error:
        raise type(error)(f"{error.message} (and there is no folder {text} here)") from error


def is_hub_id(model: str) -> bool:
    """Tell whether a text has the form OWNER/NAME of the hub."""
    return _HUB_ID.fullmatch(model) is not None
