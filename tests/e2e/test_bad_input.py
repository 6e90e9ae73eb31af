"""What goes wrong at the edges of a real swarm is a typed error that says what to do; the swarm goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import AutoDistributedModelForCausalLM, SequenceManagerConfig
from shoal.wire.errors import (
    InvalidRequest,
    NoRoute,
    NotAuthenticated,
    NotFound,
    ServerUnreachable,
    UnknownModel,
    Unsupported,
)
from tests.support.swarm import LiveSwarm, online
from tests.support.tiny_models import load_reference, make_tiny
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = torch.tensor([[5, 17, 3, 60, 9, 22, 41]])
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[LiveSwarm]:
    with LiveSwarm(folder, ["0:3", "3:6"]) as running:
        yield running


@pytest.fixture
def client(swarm: LiveSwarm, folder: Path) -> Iterator[Any]:
    model = connect(swarm, folder, config=SequenceManagerConfig(open_timeout_s=2.0, recovery_timeout_s=2.0))
    yield model
    model.connection.close()


def connect(running: LiveSwarm, folder: Path, **changes: Any) -> Any:
    where = {"swarm": running.url, "api_key": running.api_key, **changes}
    return AutoDistributedModelForCausalLM.from_pretrained(folder, **where)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[int]:
    answer: list[int] = load_reference(folder).generate(PROMPT, **GREEDY)[0].tolist()
    return answer


def test_a_model_that_nobody_serves_is_told_with_those_that_are(swarm: LiveSwarm, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", num_blocks=4)
    with pytest.raises(UnknownModel, match=r"other.*serves: tiny-llama \(fp32\).*shoal server run"):
        connect(swarm, other)


def test_a_folder_that_is_not_there_and_a_family_that_is_not_known(swarm: LiveSwarm, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no model folder"):
        connect(swarm, tmp_path / "nothing")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(Unsupported, match=r"'t5' is not supported; supported are llama, bloom"):
        connect(swarm, tmp_path)


def test_wrong_credentials_are_refused_with_what_to_do(swarm: LiveSwarm, folder: Path) -> None:
    with pytest.raises(NotAuthenticated):
        connect(swarm, folder, api_key="shoal_wrong")
    with pytest.raises(NotAuthenticated, match="another certificate"):
        connect(swarm, folder, swarm=swarm.url[:-4] + ("0000" if swarm.url[-4:] != "0000" else "1111"))
    with pytest.raises(InvalidRequest, match="shoal://"):
        connect(swarm, folder, swarm="http://127.0.0.1:1")


def test_without_a_swarm_the_error_names_all_places(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SHOAL_SWARM", raising=False)
    monkeypatch.setenv("SHOAL_CONFIG_DIR", str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"swarm=.*SHOAL_SWARM.*shoal up.*swarm\.json"):
        AutoDistributedModelForCausalLM.from_pretrained(folder)


def test_a_server_with_other_weights_is_refused_and_disturbs_nobody(
    swarm: LiveSwarm, client: Any, wanted: list[int], tmp_path: Path
) -> None:
    forged = make_tiny(tmp_path / "tiny-llama", seed=5)
    name = swarm.start_server("0:3", name="forger", model=forged, wait=False)
    child = swarm.children[name]
    assert wait_until(lambda: not child.running, 60)
    assert child.returncode not in (0, None)
    assert "BlockHashMismatch" in child.log_tail(40) or "block 0" in child.log_tail(40)
    swarm.children.pop(name).stop()
    assert online(swarm.status()) == 2
    assert client.generate(PROMPT, **GREEDY)[0].tolist() == wanted


def test_a_gap_in_coverage_names_the_blocks_and_heals(swarm: LiveSwarm, client: Any, wanted: list[int]) -> None:
    session = client.inference_session(max_tokens=8)
    session.step(torch.randn(1, 2, client.connection.hidden_size))
    swarm.kill("server-2")
    with pytest.raises(NoRoute):
        session.step(torch.randn(1, 1, client.connection.hidden_size))
    assert session.positions == (2,)
    swarm.wait_until(lambda status: online(status) == 1, "the lease of the killed server has ended")

    def no_route() -> bool:
        try:
            client.generate(PROMPT, **GREEDY)
        except NoRoute as error:
            return "3" in str(error)
        except ServerUnreachable:
            return False
        return False

    assert wait_until(no_route)
    swarm.restart_server("server-2")
    swarm.wait_until(lambda status: online(status) == 2, "the server is back")

    def answers() -> bool:
        try:
            return bool(client.generate(PROMPT, **GREEDY)[0].tolist() == wanted)
        except NoRoute:
            return False

    assert wait_until(answers)
    session.step(torch.randn(1, 1, client.connection.hidden_size))
    assert session.positions == (3,)
    session.close()


def test_sessions_survive_a_restart_of_registry_and_router(
    swarm: LiveSwarm, folder: Path, client: Any, wanted: list[int]
) -> None:
    """The control plane is not on the path of a token; afterwards new clients find everything as before."""
    hidden = torch.randn(1, 4, client.connection.hidden_size)
    with client.inference_session(max_tokens=8) as session:
        before = session.step(hidden[:, :2])
        swarm.kill("registry")
        swarm.kill("router")
        session.step(hidden[:, 2:])
        assert before.shape == (1, 2, client.connection.hidden_size)
    for name in ("registry", "router"):
        swarm.start_service(name)
    for name in ("registry", "router"):
        swarm.wait_ready(name)
    swarm.wait_until(lambda status: online(status) == 2, "both servers are known again")
    newcomer = connect(swarm, folder)
    try:
        assert wait_until(lambda: newcomer.generate(PROMPT, **GREEDY)[0].tolist() == wanted)
    finally:
        newcomer.connection.close()
