"""The rooms of the C code: who stands on which floor, and which test stands beside each."""

from __future__ import annotations

import re
from pathlib import Path

import house
import pytest
from torch.distributed.fsdp import _fully_shard

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


@pytest.mark.parametrize("folder", house.FLOORS)
def test_every_room_is_on_a_floor(folder: str) -> None:
    placed = [room for floor in house.FLOORS[folder] for room in floor]
    assert sorted(placed) == sorted(house.rooms_of(folder))


@pytest.mark.parametrize("folder", house.FLOORS)
def test_includes_and_calls_point_down_inside_of_a_folder(folder: str) -> None:
    arrows = house.arrows_of(house.rooms_of(folder))
    assert sum(map(len, arrows.values())) > 50, "no arrows: the guard would guard nothing"
    assert house.upward(arrows, house.FLOORS[folder]) == {}
    assert house.circles(arrows) == []


def test_what_a_room_of_the_types_shows_stands_in_its_own_header() -> None:
    """objects.h shows the types; whoever calls a room includes its header."""
    rooms = house.rooms_of("python")
    assert {room for room, files in rooms.items() if len(files) < 2} == {"seen", "module"}
    arrows = house.arrows_of(rooms)
    assert set(arrows["objects"]) == {"seen"}


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


# ---- the drop-in's tax ---------------------------------------------------------------------------

TAX = "/* ---- names of torch's private interface;"
FOR_TESTS = {"_check", "collectives_parked"}
MODELS = {"forecast.py", "advice.py", "fake_step.py", "spans.py"}
"""Files that play a step through, with the same words for its parts."""
_TABLE = re.compile(r"^(?:static )?Py(?:GetSet|Method)Def \w+\[\] = .*?^};", re.M | re.S)
_ENTRY = re.compile(r'^    (?:\{|GROUP_FLAG\()"(\w+)",', re.M)


@pytest.mark.torch("2.13")  # the names of that release
def test_what_only_torchs_internals_need_stands_under_a_divider() -> None:
    """Names that nothing of fsdp_c uses are there because torch has them; all of them say so."""
    files = [path for path in sorted((ROOT / "fsdp_c").glob("*.py")) if path.name not in MODELS]
    ours = "\n".join(path.read_text() for path in files)
    torchs = "\n".join(path.read_text() for path in Path(*_fully_shard.__path__).glob("*.py"))
    used, taxed = set(), set()
    for path in sorted((house.CSRC / "python").glob("*_*.c")) + [
        house.CSRC / "python/param.c",
        house.CSRC / "python/state.c",
    ]:
        for table in _TABLE.findall(path.read_text()):
            above, _, below = table.partition(TAX)
            used.update(_ENTRY.findall(above))
            taxed.update(_ENTRY.findall(below))
    assert len(used) > 40, "no names: the guard would guard nothing"
    unused = {name for name in used | taxed if not re.search(rf"\b{name}\b", ours)}
    assert unused - FOR_TESTS == taxed
    assert {name for name in taxed if re.search(rf"\b{name}\b", torchs)} == taxed
