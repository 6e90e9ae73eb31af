"""A model made before a fork(): its children are told at once what is wrong, and the parent goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import make_tiny

CHILDREN = 2
# A child that waited for the threads of its parent would wait for ever.
LIMIT_S = 100.0

_PROGRAM = """
    import gc, json, multiprocessing, sys
    from pathlib import Path
    from shoal.wire.errors import Unsupported
    from tests.support.failing import PROMPT, greedy
    from tests.support.fake_server import FakeSwarm
    from tests.support.waiting import wait_until

    def child(swarm, session, answers):
        told = []
        for use in (
            lambda: greedy(swarm.model, 3),
            lambda: session.step(PROMPT),
            lambda: greedy(swarm.model, 3, session=session),
            lambda: swarm.connection.server_info(swarm.records[0]),
        ):
            try:
                use()
                told.append(["nothing", ""])
            except Unsupported as error:
                told.append([error.reason, str(error)])
        session.close()
        swarm.connection.close()
        swarm.model = swarm.connection = None
        gc.collect()
        answers.send(told)
        answers.close()

    with FakeSwarm(Path(sys.argv[1]), "0:6") as swarm:
        session = swarm.model.inference_session(max_tokens=40)
        before = greedy(swarm.model, 3, session=session)
        fork = multiprocessing.get_context("fork")
        pipes = [fork.Pipe(duplex=False) for _ in range(int(sys.argv[2]))]
        children = [fork.Process(target=child, args=(swarm, session, pipe[1])) for pipe in pipes]
        for process in children:
            process.start()
        for _, write in pipes:
            write.close()
        told = [read.recv() for read, _ in pipes]
        for process in children:
            process.join()
        reference = greedy(swarm.reference, 3)
        result = {
            "told": told,
            "codes": [process.exitcode for process in children],
            "before": before == reference,
            "after": greedy(swarm.model, 3) == reference,
            "one_session": wait_until(lambda: swarm.open_sessions == 1),
        }
        # The parent's own session is still the server's only one.
        session.close()
    Path(sys.argv[3]).write_text(json.dumps(result))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")
def test_nw05_children_of_a_fork_are_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    folder, answer = make_tiny(tmp_path / "tiny-llama"), tmp_path / "answer.json"
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(folder), str(CHILDREN), str(answer)]
    # Imports of Shoal in this process set it too, and it must not depend on them.
    env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result: dict[str, Any] = json.loads(answer.read_text())
    assert result["codes"] == [0] * CHILDREN
    assert len(result["told"]) == CHILDREN
    for reasons in result["told"]:
        assert [reason for reason, _ in reasons] == ["Unsupported"] * 4
        assert all("fork()" in text and "spawn" in text for _, text in reasons)
    assert (result["before"], result["after"]) == (True, True)
    assert result["one_session"]
