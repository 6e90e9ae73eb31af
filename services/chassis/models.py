"""Which model a caller means when it names one in part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.swarm.snapshot import ModelKey
from shoal.wire.errors import InvalidRequest, UnknownModel


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model named in full or in part; an empty field fits every model."""

    prefix: str = ""
    config_digest: bytes = b""
    numeric_class: str = ""

    def fits(self, model: ModelKey) -> bool:
        """Tell whether the model may be the one that is meant."""
        return (
            self.prefix in ("", model.prefix)
            and self.config_digest in (b"", model.config_digest)
            and self.numeric_class in ("", model.numeric_class)
        )


EVERY_MODEL = Wanted()


def choose(wanted: Wanted, models: Iterable[ModelKey]) -> ModelKey:
    """Return the one model that is meant.

    Raises:
        InvalidRequest: if no prefix is given, or several models fit.
        UnknownModel: if none fits; the message names those that are served.
    """
    if not wanted.prefix:
        raise InvalidRequest("name a model: `prefix` is empty")
    served = sorted(models, key=str)
    fitting = [model for model in served if wanted.fits(model)]
    if not fitting:
        names = ", ".join(str(model) for model in served[:10]) or "none"
        raise UnknownModel(f"no server serves {wanted.prefix!r} as asked; models served now: {names}")
    if len(fitting) > 1:
        names = ", ".join(str(model) for model in fitting[:10])
        raise InvalidRequest(f"several models are called {wanted.prefix!r}: {names}; give numeric class or digest too")
    return fitting[0]
