"""Whatever stands in prompts, options, policies and grids: it is taken, or refused in one line."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from beaconscope import AnalyzeOptions, RecordOptions, Sampling, parse_policy
from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.kv.policies import POLICIES
from beaconscope.record.prompts import names_a_file, read_prompts, read_text
from beaconscope.replay import MeasureOptions
from beaconscope.replay.grid import read_grid
from beaconscope.report import ReportOptions
from beaconscope.selection import select

FAST = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, -1, 1, 2**31, 2**63, 10**1000, math.nan, math.inf])
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def taken_or_refused(work: Callable[[], Any]) -> Any:
    """What comes of it, None where it is refused as it should be."""
    try:
        return work()
    except BeaconScopeError:
        return None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs") / "file"


@FAST
@given(data=st.binary(max_size=200))
def test_texts(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    text = taken_or_refused(lambda: read_text(str(path), "prompt"))
    assert text is None or text.strip()


def test_a_device_that_never_ends() -> None:
    with pytest.raises(BeaconScopeError, match="more than 256 MB"):
        read_text("/dev/zero", "prompt")


LINES = st.one_of(
    st.text(),
    JSON.map(json.dumps),
    st.fixed_dictionaries({"id": st.text() | JSON, "prompt": st.text() | JSON}, optional={"answer": JSON}).map(
        json.dumps
    ),
)


@FAST
@given(lines=st.lists(LINES, max_size=4))
@example(lines=["[" * 100_000])
@example(lines=['{"id": ' + "1" * 5000 + ', "prompt": "x"}'])
@example(lines=['{"id": NaN, "prompt": "x"}'])
@example(lines=['{"id": 1e999, "prompt": "\\ud800"}'])
@example(lines=['{"id": "a/../../b", "prompt": "x"}'])
def test_many_prompts(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    for prompt in taken_or_refused(lambda: read_prompts(str(path))) or ():
        inside = path.parent / f"{prompt.id}.parquet"
        assert inside.resolve().parent == path.parent.resolve()


@given(name=st.text(max_size=300))
@example(name="..")
@example(name="a/b")
@example(name="a\\b")
@example(name="C:x")
@example(name="a\0")
@example(name="con")
@example(name="NUL.txt")
@example(name="x" * 201)
def test_an_id_never_leaves_its_folder(name: str) -> None:
    if names_a_file(name):
        assert Path(f"/here/{name}.parquet").name == f"{name}.parquet"
        assert not {"/", "\\", ":", "\0"} & set(name)
        assert name.split(".")[0].lower() not in ("con", "nul", "prn", "aux", "com1", "lpt1")


@FAST
@given(text=st.text(max_size=60) | st.sampled_from(["1" * 5000, "0-" + "9" * 5000, "0-9:0", "-", ",", "٣", "1-2-3"]))
def test_lists_of_layers(text: str) -> None:
    chosen = taken_or_refused(lambda: select(text, 12, "layers"))
    assert chosen is None or all(0 <= number < 12 for number in chosen)


@FAST
@given(name=st.sampled_from(sorted(POLICIES)), data=st.data())
def test_policies(name: str, data: Any) -> None:
    known = POLICIES[name].parameters()
    parts = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(known) if known else st.text(max_size=5),
                NUMBERS.map(str) | st.text(max_size=8) | st.just("9" * 5000),
            ),
            max_size=3,
        )
    )
    text = f"{name}:{','.join(f'{key}={value}' for key, value in parts)}"
    policy = taken_or_refused(lambda: parse_policy(text))
    assert policy is None or all(_within(value) for value in policy.params().values())


@FAST
@given(text=st.text(max_size=40))
def test_names_of_policies(text: str) -> None:
    taken_or_refused(lambda: parse_policy(text))


def _within(value: object) -> bool:
    return not isinstance(value, int | float) or abs(value) < 1 << 31


@FAST
@given(kind=st.sampled_from([Sampling, RecordOptions, AnalyzeOptions, MeasureOptions, ReportOptions]), data=st.data())
def test_numbers_of_options(kind: Any, data: Any) -> None:
    """Whatever number is given for one of them: a usage error, or one that can be computed with."""
    fields = [field for field in dataclasses.fields(kind) if str(field.type).startswith(("int", "float"))]
    field = data.draw(st.sampled_from(fields))
    number = data.draw(NUMBERS if str(field.type).startswith("float") else NUMBERS.filter(lambda n: isinstance(n, int)))
    try:
        made = kind(**{field.name: number})
    except UsageError:
        return
    value = getattr(made, field.name)
    assert not math.isnan(value) if isinstance(value, float) else value > -1


SMALL = st.one_of(st.integers(-5, 70), st.floats(), st.booleans(), st.sampled_from(["fps", "none", "x", "16"]))


@FAST
@given(
    blocks=st.lists(
        st.dictionaries(
            st.sampled_from(["policy", "budget", "interval", "beacons", "selector", "seed", "x-y"]),
            SMALL | st.lists(SMALL, max_size=4) | st.lists(st.lists(SMALL, max_size=2), max_size=2)
            | st.sampled_from(["beacon", "snapkv:window=8", "random"]),
            max_size=4,
        ),
        max_size=3,
    )
)  # fmt: skip
def test_grids(path: Path, blocks: list[dict[str, Any]]) -> None:
    lines = []
    for block in blocks:
        lines += ["[[sweep]]", *(f"{key} = {_toml(value)}" for key, value in block.items())]
    path.write_text("\n".join(lines))
    found = taken_or_refused(lambda: read_grid(path))
    assert found is None or 0 < len(found) <= 10_000


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return "nan" if math.isnan(value) else f"{'-' if value < 0 else ''}inf" if math.isinf(value) else repr(value)
    return json.dumps(value)


@FAST
@given(data=st.binary(max_size=100))
@example(data=b"a = " + b"[" * 50_000)
@example(data=b"a = " + b"1" * 5000)
@example(data=b"\xff")
@example(data=b"#" * (2 << 20))
@example(data=b'[[sweep]]\npolicy = "beacon"\nbudget = {a = 1}')
@example(data=b'[[sweep]]\npolicy = "beacon"\nbudget = 1979-05-27')
@example(data=b'sweep = "x"')
def test_files_for_grids(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    taken_or_refused(lambda: read_grid(path))


def test_a_grid_of_more_settings_than_there_is_memory_for(path: Path) -> None:
    lists = "\n".join(
        f"{name} = {list(range(1, 200))}" for name in ("budget", "interval", "beacons", "recent", "sinks")
    )
    path.write_text(f'[[sweep]]\npolicy = "beacon"\n{lists}')
    with pytest.raises(UsageError, match="give fewer values"):
        read_grid(path)
