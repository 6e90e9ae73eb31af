"""Event loggers for the library: `log.info("swarm.token_renewed", expires_in_s=600)`.

Events go to the standard `logging` module, so that an application that uses the SDK decides where they end;
nothing is printed unless it asks. Services format the same records as JSON.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import structlog

FIELDS = "shoal_fields"


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the event logger of that name. Never give it prompts, tokens or keys."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return logger


def _to_record(_: Any, __: str, fields: MutableMapping[str, Any]) -> dict[str, Any]:
    event = str(fields.pop("event", ""))
    passed_on = {key: fields.pop(key) for key in ("exc_info", "stack_info") if key in fields}
    text = " ".join([event, *(f"{key}={value}" for key, value in fields.items())]).replace("%", "%%")
    return {"msg": text, "extra": {FIELDS: {"event": event, **fields}}, **passed_on}
