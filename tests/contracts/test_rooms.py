"""Every operator has its room and its test file, and no file belongs to no operator."""

from pathlib import Path

from deepinfer_sm80.ops import OPS

ROOT = Path(__file__).parents[2]
MUST = {"__init__.py", "reference.py", "launch.py"}
MAY = {"device.py", "tuning.py", "kernel.py"}
LIBRARIES = {"formats"}  # shared by every room, not rooms themselves


def test_rooms_match_registry():
    home = ROOT / "src/deepinfer_sm80/ops"
    want = {f"{family}/{op}" for op, family in OPS.items()}
    have = {p.parent.relative_to(home).as_posix() for p in home.glob("*/*/*.py")}
    have = {room for room in have if room.split("/")[0] not in LIBRARIES}
    assert have == want, f"missing {sorted(want - have)}, unregistered {sorted(have - want)}"
    for room in want:
        files = {p.name for p in (home / room).glob("*.py")}
        assert files >= MUST, f"{room} lacks {sorted(MUST - files)}"
        assert files <= MUST | MAY, f"{room} has strangers {sorted(files - MUST - MAY)}"


def test_every_operator_has_a_test_file():
    home = ROOT / "tests/ops"
    want = {f"{family}/test_{op}.py" for op, family in OPS.items()} | _tests_of_family_libraries()
    have = {p.relative_to(home).as_posix() for p in home.glob("*/test_*.py")}
    have = {name for name in have if name.split("/")[0] not in LIBRARIES}
    assert have == want, f"missing {sorted(want - have)}, unregistered {sorted(have - want)}"


def _tests_of_family_libraries():
    """A module beside the rooms, such as ops/kv_cache/layout.py, may have a test file of its own."""
    libraries = [p for p in (ROOT / "src/deepinfer_sm80/ops").glob("*/*.py") if p.parent.name not in LIBRARIES]
    names = {f"{p.parent.name}/test_{p.stem}.py" for p in libraries if p.stem != "__init__"}
    return {name for name in names if (ROOT / "tests/ops" / name).exists()}
