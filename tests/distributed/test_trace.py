"""``fsdp_c.trace`` on several ranks shows the wait for a late rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import traced
from launch import run_ranks

from fsdp_c._tools.trace_spans import COMPUTE, FORWARD, GATHER, GATHER_WAIT


@pytest.mark.parametrize("impl", ["fsdp_c", "torch"])
def test_trace_shows_the_wait_for_a_late_rank(impl: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (ranks, summary), (same, _) = run_ranks(traced.trace_late_rank, 2, (impl, str(tmp_path)))
    assert ranks == same, "every rank must have the spans of all ranks"
    late = traced.LATE * 1e9
    waits = [[s for s in rank if s.kind == GATHER_WAIT] for rank in ranks]
    longest = max(waits[0], key=lambda s: s.length)
    assert longest.unit == "1" and longest.length > 0.6 * late
    assert all(s.length < 0.6 * late for s in waits[1])
    sleeping = [s for s in ranks[1] if s.kind == FORWARD and s.unit == "0"]
    assert sleeping[0].length >= late and sleeping[0].track == COMPUTE
    # All ranks use one clock: rank 0's wait ends after the late rank has started its gather.
    assert longest.end > sleeping[0].end
    assert [s.unit for s in ranks[0] if s.track == GATHER][:2] == ["0", "1"]
    assert "'1' waits" in summary and "for its gather on rank 0" in summary
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "0.png"]
