"""The rule that imports point one way, and that looking at BeaconScope loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import beaconscope

PACKAGE = Path(beaconscope.__file__).parent
HEAVY = ("torch", "transformers", "pandas", "sklearn", "plotly")

FOUNDATION = {"kv", "trace", "models"}
STAGES = {"record", "analyze", "replay", "report"}
# A room may import the rooms, and the modules of rooms, that are listed for it; every room may import `errors`.
MAY_IMPORT = {
    "trace": set(),
    # The cache stands on the tap of a model; the tap only on the arithmetic of rotation and of attention.
    "kv": {"models"},
    "models": {"kv.rotary", "kv.step"},
    "reasoner": FOUNDATION,
    "record": FOUNDATION,
    "analyze": FOUNDATION,
    "replay": FOUNDATION,
    # A report shows what the analysis found, and computes attention as it does.
    "report": FOUNDATION | {"analyze"},
    "cli": FOUNDATION | STAGES | {"reasoner"},
}
# What the live cache and the replay share, so it may look at neither a cache nor a model.
POLICIES_MAY_IMPORT = {"kv.policies", "kv.beacons", "kv.heads", "kv.kinds", "kv.rotary", "kv.softmax", "kv.step"}


def imported_modules(source: Path) -> set[str]:
    """Every module of this package that ``source`` imports, wherever in the file, as a dotted name."""
    module = source.relative_to(PACKAGE.parent).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module[: -node.level]) if node.level else ""
            name = ".".join(part for part in (base, node.module or "") if part)
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] == "beaconscope"}


def rooms() -> list[str]:
    return sorted(folder.name for folder in PACKAGE.iterdir() if folder.is_dir() and any(folder.glob("**/*.py")))


def imports_beside(folder: Path, allowed: set[str]) -> list[str]:
    """What the files under ``folder`` import from rooms beside the ``allowed`` ones."""
    return [
        f"{source.relative_to(PACKAGE)} imports {name}"
        for source in sorted(folder.rglob("*.py"))
        for name in sorted(imported_modules(source))
        if name.split(".")[1:2]
        and name.split(".")[1] in MAY_IMPORT
        and not any(f"{name}.".startswith(f"beaconscope.{place}.") for place in allowed)
    ]


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_only_what_lies_below_it(room):
    assert room in MAY_IMPORT, f"say in MAY_IMPORT what {room} may import"
    assert imports_beside(PACKAGE / room, MAY_IMPORT[room] | {room}) == []


def test_policies_know_nothing_of_caches_and_models():
    assert imports_beside(PACKAGE / "kv" / "policies", POLICIES_MAY_IMPORT) == []


def test_errors_import_nothing_of_the_package():
    assert imported_modules(PACKAGE / "errors.py") == set()


def heavy_modules_after(statement: str) -> list[str]:
    script = f"""
        import sys
        {statement}
        print(*[name for name in {HEAVY!r} if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("module", ["beaconscope", "beaconscope.cli", "beaconscope.errors"])
def test_importing_loads_nothing_heavy(module):
    assert heavy_modules_after(f"import {module}") == []


def test_importing_trace_loads_no_torch():
    assert not {"torch", "transformers"} & set(heavy_modules_after("import beaconscope.trace"))


def test_every_public_name_can_be_had_and_is_listed():
    for name in beaconscope.__all__:
        assert getattr(beaconscope, name) is not None
        assert name in dir(beaconscope)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        beaconscope.no_such_thing  # noqa: B018


def test_record_is_the_function_whatever_was_imported_before():
    # GIVEN a subpackage that has the name of a public function
    from beaconscope.record.options import RecordOptions

    # THEN the name still is the function, and the subpackage can be imported from
    assert callable(beaconscope.record)
    assert beaconscope.RecordOptions is RecordOptions
