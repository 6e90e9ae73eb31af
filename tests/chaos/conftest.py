"""A control plane whose links go through proxies, one for each module, healed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.links import LinkedPlane


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, module_postgres_url: str, module_redis_url: str
) -> Iterator[LinkedPlane]:
    with LinkedPlane(tmp_path_factory.mktemp("plane"), module_postgres_url, module_redis_url) as linked:
        yield linked


@pytest.fixture
def linked(whole: LinkedPlane) -> Iterator[LinkedPlane]:
    yield whole
    whole.heal()
