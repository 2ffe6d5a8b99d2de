"""The machine code of the CUDA kernels for sm_80, sm_90 and sm_100: 128-bit loads and stores."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda checks"), pytest.mark.timeout(900)]

UNROLL = 4
"""Accesses of each loop of ``csrc/kernels/lines.cuh``."""
# A move has two loops. Per access, one loads a word, and the other (of source and target that are
# aligned differently) loads two. Both store one word. One more store fills with zeros.
MOVES = {"LDG": 3 * UNROLL, "STG": 2 * UNROLL + 1}
# A cast has one loop for each of 16 pairs of types. 11 loops load and 11 store 16 bytes at once.
CASTS = {name: number + 11 * UNROLL for name, number in MOVES.items()}
KERNELS = {
    "fck_move_lines": MOVES,
    "fck_move_many_lines": MOVES,
    "fck_cast_lines": CASTS,
    "fck_cast_many_lines": CASTS,
}


def test_each_kernel_loop_over_words_has_128_bit_accesses(run_worker: Any) -> None:
    by_compiler = run_worker("machine_code")
    if "skipped" in by_compiler:
        pytest.skip(by_compiler["skipped"])
    assert "NVRTC" in by_compiler
    for compiler, by_architecture in by_compiler.items():
        assert set(by_architecture) == {"sm_80", "sm_90", "sm_100"}
        for architecture, counts in by_architecture.items():
            assert {"fck_move_lines", "fck_cast_lines"} <= set(counts)
            for kernel in KERNELS.keys() & counts.keys():  # CUDA 12 compiles two of them
                for access, number in KERNELS[kernel].items():
                    where = (compiler, architecture, kernel, access)
                    assert counts[kernel].get(access, 0) >= number, where
