"""Logs of a service: events on standard error, JSON unless a person watches.

All records pass here, also those of libraries. Credentials that slipped into a text are hidden before it is
written.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from shoal.wire.logs import FIELDS
from shoal.wire.tokens import API_KEY_PREFIX

HIDDEN = "[hidden]"
SECRET_NAMES = re.compile(r"authorization|password|secret|token$|api_?key|push_key|private_key", re.IGNORECASE)
SECRET_TEXTS = re.compile(
    r"eyJ[\w-]{8,}\.[\w-]+\.[\w-]+"  # a JWT
    r"|\b" + API_KEY_PREFIX + r"[\w-]{20,}"
    r"|\bhf_\w{16,}"  # a token of the hub
    r"|(?<=Bearer )\S+|(?<=ApiKey )\S+"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"  # user and password of a URL
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)

Event = MutableMapping[str, Any]


def configure_logs(service: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Send all logs of the process to `stream` (standard error), each record with the service's name."""
    stream = stream or sys.stderr
    for_people = stream.isatty()
    renderer = (
        structlog.dev.ConsoleRenderer(colors=True) if for_people else structlog.processors.JSONRenderer(default=str)
    )

    def add_service(_: Any, __: str, event: Event) -> Event:
        event.setdefault("service", service)
        return event

    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_fields_of_library, *_common()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                add_service,
                structlog.processors.format_exc_info,
                hide_secrets,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for library in ("grpc", "asyncio"):  # their debug lines come by the hundred and help nobody here
        logging.getLogger(library).setLevel(max(root.level, logging.INFO))
    for library in ("httpx2", "httpcore2"):  # they write whole URLs, and those of downloads are signed
        logging.getLogger(library).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_common(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def hide_secrets(_: Any, __: str, event: Event) -> Event:
    """Hide values whose name says that they are secret, and whatever looks like a credential in any text."""
    return {name: HIDDEN if SECRET_NAMES.search(name) else _clean(value) for name, value in event.items()}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return SECRET_TEXTS.sub(HIDDEN, value)
    if isinstance(value, dict):
        return hide_secrets(None, "", {str(name): item for name, item in value.items()})
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(item) for item in value]
    if isinstance(value, int | float | None):
        return value
    return SECRET_TEXTS.sub(HIDDEN, str(value))


def _common() -> list[structlog.typing.Processor]:
    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _fields_of_library(_: Any, __: str, event: Event) -> Event:
    """Take the fields of a record of `shoal.wire.logs` instead of its text."""
    fields = getattr(event.get("_record"), FIELDS, None)
    return event if fields is None else {**event, **fields}
