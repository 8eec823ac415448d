"""Names of files, and what is refused before any work is done."""

import os
from pathlib import Path

import pytest

from beaconscope.cli import output
from beaconscope.errors import BeaconScopeError
from tests.trace.made import interrupted


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def read_only(here):
    """A folder where nothing can be written; not to be had for root, who may write everywhere."""
    folder = here / "shut"
    folder.mkdir()
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("root may write everywhere")
    yield folder
    folder.chmod(0o700)


@pytest.mark.parametrize(
    ("prompt", "name"), [("texts/plan.txt", "plan.parquet"), ("plan", "plan.parquet"), ("-", "trace.parquet")]
)
def test_a_trace_is_named_after_its_prompt_and_lies_in_the_current_folder(here, prompt, name):
    assert output.trace_path(None, prompt, force=False) == Path(name)


def test_the_name_asked_for_is_taken_as_it_is(here):
    assert output.trace_path(Path("x.bin"), "plan.txt", force=False) == Path("x.bin")


def test_an_existing_file_is_refused_with_both_remedies(here):
    Path("plan.parquet").write_bytes(b"kept")
    with pytest.raises(BeaconScopeError, match=r"plan\.parquet exists; give --force .* --output"):
        output.trace_path(None, "plan.txt", force=False)
    assert Path("plan.parquet").read_bytes() == b"kept"


def test_force_allows_an_existing_file_and_touches_nothing_yet(here):
    Path("plan.parquet").write_bytes(b"kept")
    assert output.trace_path(None, "plan.txt", force=True) == Path("plan.parquet")
    assert Path("plan.parquet").read_bytes() == b"kept"


def test_a_missing_folder_is_refused_with_the_command_that_makes_it(here):
    with pytest.raises(BeaconScopeError, match="mkdir -p a/b"):
        output.writable_file(Path("a/b/trace.parquet"), force=False)


def test_a_folder_is_no_file_and_a_file_is_no_folder(here):
    Path("folder").mkdir()
    Path("file").touch()
    with pytest.raises(BeaconScopeError, match="is a folder"):
        output.writable_file(Path("folder"), force=True)
    with pytest.raises(BeaconScopeError, match="is a file"):
        output.writable_file(Path("file/trace.parquet"), force=True)
    with pytest.raises(BeaconScopeError, match="is a file"):
        output.traces_folder(Path("file"), "many.jsonl")


def test_a_folder_that_cannot_be_written_is_refused(read_only):
    with pytest.raises(BeaconScopeError, match="nothing can be written in"):
        output.writable_file(read_only / "trace.parquet", force=False)
    with pytest.raises(BeaconScopeError, match="nothing can be written in"):
        output.traces_folder(read_only, "many.jsonl")


def test_a_folder_on_a_disk_mounted_read_only_is_refused(monkeypatch, here):
    # What root is told by a read-only file system.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(BeaconScopeError, match="nothing can be written in"):
        output.writable_file(here / "trace.parquet", force=False)


def test_many_traces_go_to_a_folder_named_after_the_prompts_which_may_exist(here):
    assert output.traces_folder(None, "data/many.jsonl") == Path("many-traces")
    assert not Path("many-traces").exists()
    Path("many-traces").mkdir()
    assert output.traces_folder(None, "data/many.jsonl") == Path("many-traces")


def test_an_input_must_be_a_file_that_is_there(here):
    with pytest.raises(BeaconScopeError, match="does not exist"):
        output.input_file(Path("none.parquet"))
    with pytest.raises(BeaconScopeError, match="is a folder"):
        output.input_file(here)


def test_where_a_recording_was_cut_its_journal_is_spoken_of(here):
    interrupted(Path("a plan.parquet"))
    with pytest.raises(BeaconScopeError) as caught:
        output.input_file(Path("a plan.parquet"))
    assert str(caught.value) == (
        "a plan.parquet does not exist, but a plan.parquet.journal holds a recording that is under way or was "
        "interrupted; run `beaconscope recover 'a plan.parquet'`"
    )
    with pytest.raises(BeaconScopeError, match=r"run `beaconscope recover 'a plan.parquet.journal'`"):
        output.input_file(Path("a plan.parquet.journal"))
