"""The rooms of the C core: who stands on which floor, and which test stands beside each."""

from __future__ import annotations

from pathlib import Path

import house

ROOT = Path(__file__).resolve().parents[2]

ELSEWHERE = {"state": ("test_train", "test_reset")}
"""Rooms whose tests are whole steps, where nothing less says much."""


def test_a_test_stands_beside_each_room_of_the_core() -> None:
    rooms = {path.stem for path in (ROOT / "csrc/core").glob("*.c")}
    tests = {path.stem for path in (ROOT / "tests/c").glob("test_*.c")}
    assert len(rooms) > 10, "no rooms: the guard would guard nothing"
    assert ELSEWHERE.keys() <= rooms
    wanted = {room: ELSEWHERE.get(room, (f"test_{room}",)) for room in rooms}
    missing = {room: names for room, names in wanted.items() if not tests.issuperset(names)}
    assert missing == {}


def test_a_folder_of_tests_holds_tests() -> None:
    """What their ranks run goes into its workers/, what several folders use into tests/harness."""
    others = [
        str(path.relative_to(ROOT))
        for folder in ("distributed", "parity", "faults")
        for path in sorted((ROOT / "tests" / folder).glob("*.py"))
        if not path.name.startswith("test_") and path.name != "conftest.py"
    ]
    assert others == [], "git mv them"


# ---- floors --------------------------------------------------------------------------------------


def test_every_room_of_the_core_is_on_a_floor() -> None:
    placed = [room for floor in house.FLOORS["core"] for room in floor]
    assert sorted(placed) == sorted(house.rooms_of("core"))


def test_includes_and_calls_point_down_inside_of_the_core() -> None:
    arrows = house.arrows_of(house.rooms_of("core"))
    assert sum(map(len, arrows.values())) > 50, "no arrows: the guard would guard nothing"
    assert house.upward(arrows, house.FLOORS["core"]) == {}
    assert house.circles(arrows) == []


def test_an_arrow_that_runs_up_is_seen(tmp_path: Path) -> None:
    low, high = tmp_path / "low.c", tmp_path / "high.c"
    low.write_text("int fc_low(void) {\n    return fc_high(); /* not fc_never() */\n}\n")
    high.write_text('#include "low.h"\n\nint fc_high(void) {\n    return fc_low();\n}\n')
    arrows = house.arrows_of({"low": [low], "high": [high]})
    assert house.upward(arrows, ({"low"}, {"high"})) == {"low -> high": {"fc_high"}}
    assert house.circles(arrows) == [{"low", "high"}]


def test_only_the_state_machine_takes_a_group() -> None:
    assert set(house.functions_taking("fc_group")) <= {"group", "order", "state"}
    fields = house.fields_of("fc_group", house.CSRC / "core/group.h")
    assert len(fields) <= 16
    assert sum(field.startswith("bool ") for field in fields) <= 6
