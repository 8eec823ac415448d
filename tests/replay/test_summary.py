"""Tables, front and answer, on numbers that a person can check."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from beaconscope import BeaconKV, Full, RandomEviction, StreamingLLM
from beaconscope.kv.policies import Oracle, SnapKV
from beaconscope.replay.grid import label, random_queries, recent_only, with_controls
from beaconscope.replay.summary import MEANS, answer, by_setting, compare, ranked_by, to_dict

BEACON = BeaconKV(budget=100, beacons=16, recent=16)
HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def frame_of(masses, trts=3):
    """Rows of settings whose mass on head number h is the given mass + h / 1000."""
    rows = []
    for policy, mass, size in masses:
        params = {name: getattr(policy, name) for name in policy.parameters()}
        for number, (layer, head) in enumerate(HEADS):
            rows.append(
                {
                    "trace": "t", "layer": layer, "kv_head": head, "setting": label(policy), "policy": policy.name,
                    "budget": params.get("budget"), "interval": params.get("interval"), "seed": params.get("seed"),
                    "live": policy.live, "params": json.dumps({}), "queries": 10, "missing": 0,
                    "trts": trts, **dict.fromkeys(MEANS, 0.0), "evicted": 0 if policy == Full() else 5,
                    "kv_bytes": size,
                    "mass": mass + number / 1000, "mass_trt": (mass + number / 1000) if trts else float("nan"),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


MASSES = [
    (Full(), 0.996, 1000),
    (BEACON, 0.8, 228),
    (SnapKV(budget=100), 0.7, 228),
    (StreamingLLM(budget=100), 0.5, 101),
    (Oracle(budget=100), 0.9, 228),
    (recent_only(BEACON), 0.75, 228),
    *((each, 0.799 + 0.01 * (each.seed - 1), 228) for each in random_queries(BEACON)),
    *((RandomEviction(budget=100, seed=seed), 0.4 + seed / 100, 228) for seed in range(5)),
]


def test_controls_stand_beside_each_budget():
    found = with_controls([BEACON, BeaconKV(budget=200)])
    names = [policy.name for policy in found]
    assert {name: names.count(name) for name in set(names)} == {
        "full": 1, "oracle": 2, "streaming-llm": 2, "random": 10, "beacon": 2 + 2 + 6,
    }  # fmt: skip
    twin = recent_only(BEACON)
    assert (twin.beacons, twin.recent, twin.budget) == (0, 32, 100)
    assert recent_only(BeaconKV(budget=30, beacons=16, recent=16 - 3)) is not None
    assert recent_only(BeaconKV(budget=30, beacons=16, recent=16)) is None


def test_settings_are_ranked_with_their_distances():
    table = by_setting(frame_of(MASSES)).set_index("setting")
    row = table.loc[label(BEACON)]
    assert row["mass_trt"] == pytest.approx(0.8015)
    assert row["to_oracle"] == pytest.approx(0.1)
    assert row["over_random"] == pytest.approx(0.8 - 0.42)
    assert row["kv_bytes"] == 4 * 228
    random = table.loc[label(RandomEviction(budget=100))]
    assert random["seeds"] == 5
    assert random["kv_bytes"] == 4 * 228
    assert random["spread"] == pytest.approx(0.0158, abs=1e-4)
    at_budget = table[table["budget"] == 100]
    assert at_budget["mass_trt"].is_monotonic_decreasing


def test_the_front_holds_what_nothing_usable_beats():
    table = by_setting(frame_of(MASSES)).set_index("setting")
    front = set(table.index[table["pareto"]])
    # The oracle is better than all of its size, but no cache can have it.
    assert front == {"full", label(BEACON), label(StreamingLLM(budget=100))}


def test_a_difference_is_paired_by_head():
    frame = frame_of(MASSES)
    found = compare(frame, label(BEACON), label(SnapKV(budget=100)), "mass_trt")
    # The same on every head: heads differ, the difference does not.
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert found.exceeds_spread
    seeds = compare(frame, label(BEACON), label(random_queries(BEACON)[0]), "mass_trt")
    assert seeds.mean == pytest.approx(0.001)
    assert seeds.low < 0 < seeds.high
    assert not seeds.exceeds_spread
    assert compare(frame, label(BEACON), "no such setting", "mass_trt") is None


def test_the_answer_says_what_wins_and_whether_beacons_matter():
    frame = frame_of(MASSES)
    found = answer(frame, [BEACON, SnapKV(budget=100)])
    assert found.best == label(BEACON)
    assert "80.2 % of the attention of thought-revisiting tokens" in found.text
    assert "beats as many recent queries without beacons (+5.0 points" in found.text
    assert "does not differ beyond the spread from a random handful of old queries" in found.text
    assert "beats random eviction (+38.0 points" in found.text
    assert "teacher-forced" in found.text
    plain = json.loads(json.dumps(to_dict(by_setting(frame), found), allow_nan=False))
    assert plain["answer"]["differences"]["recent only"]["exceeds_spread"] is True


def test_without_revisits_all_queries_count():
    frame = frame_of(MASSES, trts=0)
    assert ranked_by(frame) == "mass"
    assert "no revisiting token is known" in answer(frame, [BEACON]).text


def test_an_answer_without_beacons_or_controls():
    text = answer(frame_of(MASSES[2:3]), [SnapKV(budget=100)]).text
    assert text.startswith("snapkv:budget=100 keeps 70.2 %")
    assert "controls" in answer(frame_of(MASSES[1:2]), [BEACON]).text
