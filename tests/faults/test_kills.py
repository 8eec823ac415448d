"""A few kills of every run of the tests; ``python -m tests.faults.kills`` does many."""

from __future__ import annotations

import pytest

from tests.faults.kills import kill_a_recording, kill_a_replay, make_material


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_a_killed_recording_loses_nothing_that_was_written(material, tmp_path, seed):
    kill_a_recording(material, tmp_path / "here", seed)


@pytest.mark.parametrize("seed", [1, 3])
def test_a_killed_replay_goes_on_from_what_is_finished(material, tmp_path, seed):
    kill_a_replay(material, tmp_path / "here", seed)
