"""Coverage of blocks, gaps, and which block hash counts."""

from __future__ import annotations

from shoal.swarm.coverage import BlockCoverage, block_coverage, majority_hashes, missing_blocks, runs, spell_blocks
from shoal.swarm.snapshot import Load, ModelKey, ServerState, SwarmSnapshot
from shoal.swarm.spans import Span
from tests.support.swarms import MODEL, block_hash, make_server


def test_coverage_counts_online_and_joining_servers_and_free_tokens() -> None:
    snapshot = SwarmSnapshot.of(
        [
            make_server("a", 0, 4, num_blocks=6, load=Load(400)),
            make_server("b", 2, 6, num_blocks=6, load=Load(40), state=ServerState.JOINING),
            make_server("c", 3, 5, num_blocks=6, load=Load(7)),
            make_server("d", 0, 6, num_blocks=6, state=ServerState.DRAINING),
            make_server("other", 0, 6, num_blocks=6, model=ModelKey("other", b"", "fp32")),
        ]
    )
    coverage = block_coverage(snapshot, MODEL)
    assert coverage == [
        BlockCoverage(0, 1, 0, 100),
        BlockCoverage(1, 1, 0, 100),
        BlockCoverage(2, 1, 1, 100),
        BlockCoverage(3, 2, 1, 103),
        BlockCoverage(4, 1, 1, 3),
        BlockCoverage(5, 0, 1, 0),
    ]
    assert missing_blocks(coverage) == [5]


def test_unknown_model_has_no_coverage() -> None:
    assert block_coverage(SwarmSnapshot(), MODEL) == []


def test_most_frequent_hash_wins_and_a_pinned_one_beats_it() -> None:
    wrong = tuple(block_hash(block, "wrong") for block in range(2))
    servers = [make_server("a", 0, 2), make_server("b", 0, 2), make_server("c", 0, 2, block_hashes=wrong)]
    assert majority_hashes(servers) == {0: block_hash(0), 1: block_hash(1)}
    assert majority_hashes(servers, {1: wrong[1]}) == {0: block_hash(0), 1: wrong[1]}


def test_equal_votes_are_decided_alike_in_any_order() -> None:
    servers = [make_server("a", 0, 1), make_server("b", 0, 1, block_hashes=(block_hash(0, "wrong"),))]
    assert majority_hashes(servers) == majority_hashes(servers[::-1])


def test_blocks_are_spelled_as_spans() -> None:
    assert runs([0, 1, 2, 5, 7, 8]) == [Span(0, 3), Span(5, 6), Span(7, 9)]
    assert spell_blocks([3, 4, 9]) == "3:5, 9:10"
    assert spell_blocks([]) == ""
