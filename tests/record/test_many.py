"""Many prompts: together as alone, and resumed where they stopped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from beaconscope import BeaconKV, BeaconScopeError, Full, RecordOptions, Sampling, UsageError, load_trace
from beaconscope.record import Prompt, generate
from beaconscope.record import record_prompts as run
from beaconscope.trace import HeadBlock, Journal, TokenBlock, journal_path
from tests.record.recording import endless_tokenizer, evictions_of, record_tiny, token_ids
from tests.tiny import tiny_model, tiny_tokenizer

POLICY = BeaconKV(budget=20, interval=6, beacons=4, recent=3, pool_low=6, pool_high=12)
PROMPTS = [
    Prompt("long", "Plan: add, then double. 3 and 4? Then halve."),
    Prompt("short", "7 times 8?"),
    Prompt("middle", "First sort, then drop the last.", answer="56"),
]
NEW = 32


def options(**changes):
    return RecordOptions(**{"policy": POLICY, "raw": True, "layers": "all", "max_new_tokens": NEW, **changes})


def same(ours, theirs):
    assert token_ids(ours) == token_ids(theirs)
    assert ours.text == theirs.text
    assert ours.whole == theirs.whole
    np.testing.assert_allclose(ours.tokens["logprob"], theirs.tokens["logprob"], atol=1e-4)
    assert ours.heads == theirs.heads
    for at in ours.heads:
        assert evictions_of(ours, at) == evictions_of(theirs, at)
        mine, his = ours.head(*at), theirs.head(*at)
        np.testing.assert_array_equal(mine.beacon, his.beacon)
        for name in ("query", "key", "value", "mass_sink", "mass_local", "mass_distant", "hit_mass"):
            np.testing.assert_allclose(getattr(mine, name), getattr(his, name), atol=1e-5)
        frames = [trace.beacons(*at)[["position", "query_head", "source", "members"]] for trace in (ours, theirs)]
        assert frames[0].equals(frames[1])


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_prompts_of_different_lengths_give_together_what_they_give_alone(arch, tmp_path):
    # GIVEN an end token that one of them writes early
    free = record_tiny(tiny_model(arch), tmp_path, PROMPTS[1].prompt, policy=POLICY, max_new_tokens=NEW)
    end = token_ids(free)[free.prompt_length + 8]
    model = tiny_model(arch, eos_token_id=end)
    # WHEN they run one by one, and all at once
    for size in (1, 3):
        paths = run(model, endless_tokenizer(), PROMPTS, options(), folder=tmp_path / str(size), batch_size=size)
        assert paths == [tmp_path / str(size) / f"{prompt.id}.parquet" for prompt in PROMPTS]
    # THEN the traces are the same
    alone, together = ([load_trace(tmp_path / str(size) / f"{p.id}.parquet") for p in PROMPTS] for size in (1, 3))
    for ours, theirs in zip(together, alone, strict=True):
        same(ours, theirs)
    # AND the one that ended did so, at its end token
    short = together[1]
    assert short.prompt_length < short.length <= short.prompt_length + 9
    assert token_ids(short)[-1] == end
    assert short.metadata["ended"]
    assert max(trace.length - trace.prompt_length for trace in together) > 20
    assert together[2].metadata["right_answer"] == "56"


def test_a_full_cache_with_a_shadow_gives_together_what_it_gives_alone(tmp_path):
    settings = options(policy=Full(), shadow=POLICY)
    for size in (1, 3):
        run(tiny_model(), endless_tokenizer(), PROMPTS, settings, folder=tmp_path / str(size), batch_size=size)
    for prompt in PROMPTS:
        same(*(load_trace(tmp_path / str(size) / f"{prompt.id}.parquet") for size in (3, 1)))


def test_tokens_that_arrive_late_are_the_same(tmp_path, monkeypatch):
    """On an accelerator the ends are seen late, and what was drawn past them is dropped."""
    free = record_tiny(tiny_model(), tmp_path, PROMPTS[1].prompt, policy=POLICY, max_new_tokens=NEW)
    model = tiny_model(eos_token_id=token_ids(free)[free.prompt_length + 8])
    run(model, endless_tokenizer(), PROMPTS, options(), folder=tmp_path / "prompt", batch_size=3)
    monkeypatch.setattr(generate, "_queues_work", lambda device: True)
    monkeypatch.setattr(generate, "_SETTLE_STEPS", 7)
    run(model, endless_tokenizer(), PROMPTS, options(), folder=tmp_path / "late", batch_size=3)
    for prompt in PROMPTS:
        same(*(load_trace(tmp_path / kind / f"{prompt.id}.parquet") for kind in ("late", "prompt")))


def test_each_prompt_has_the_room_that_the_context_leaves_it(tmp_path):
    """A short prompt beside a long one may write as much as alone."""
    model = tiny_model(max_position_embeddings=64)
    notes = []
    settings = options(policy=BeaconKV(budget=20, interval=6, recent=3), max_new_tokens=30)
    for size in (1, 3):
        run(
            model,
            endless_tokenizer(),
            PROMPTS,
            settings,
            folder=tmp_path / str(size),
            batch_size=size,
            note=notes.append,
        )
    for prompt, wanted in zip(PROMPTS, (20, 30, 30), strict=True):
        ours, theirs = (load_trace(tmp_path / str(size) / f"{prompt.id}.parquet") for size in (3, 1))
        same(ours, theirs)
        assert ours.length - ours.prompt_length == wanted
        assert ours.whole
    room = "The model's context of 64 tokens leaves room for 20 new ones, not 30."
    assert [note for note in notes if note.endswith(room)] == [
        f"Prompt long: {room}",
        f"Prompts long, short, middle: {room}",
    ]
    # AND what is said of each names it
    assert sum(note.startswith("Prompt short: The trace takes at most about ") for note in notes) == 1


def test_a_prompt_with_a_completion_runs_alone_in_between(tmp_path):
    prompts = [PROMPTS[0], Prompt("given", "2 and 2?", completion="<think>4</think>4"), PROMPTS[1]]
    paths = run(tiny_model(), endless_tokenizer(), prompts, options(), folder=tmp_path / "f", batch_size=3)
    given = load_trace(paths[1])
    assert given.text == "2 and 2?<think>4</think>4"
    assert given.options["teacher_forced"]
    same(
        load_trace(paths[0]), record_tiny(tiny_model(), tmp_path, PROMPTS[0].prompt, policy=POLICY, max_new_tokens=NEW)
    )


def test_what_is_finished_is_skipped_and_what_was_cut_is_not(tmp_path):
    from beaconscope.record.record import _Job

    arguments = (tiny_model(), endless_tokenizer(), PROMPTS, options(max_new_tokens=8))
    folder = tmp_path / "f"
    paths = run(*arguments, folder=folder)
    stamps = [path.stat().st_mtime_ns for path in paths]
    # WHEN of one there is a journal only, one was cut, and one is there
    paths[0].unlink()
    _leave_a_journal(paths[0], load_trace(paths[2]))
    _cut(paths[1])
    assert not load_trace(paths[1]).whole
    notes, done = [], []
    job_run = _Job.run

    def counted(self, prompts, outputs, force):
        done.extend(prompt.id for prompt in prompts)
        return job_run(self, prompts, outputs, force)

    _Job.run = counted
    try:
        assert run(*arguments, folder=folder, note=notes.append) == paths
        # THEN the first two are recorded
        assert done == ["long", "short"]
        assert notes[:2] == [
            "1 of 3 prompts are recorded already and are skipped.",
            "Recorded anew, over what is there of them: long, short.",
        ]
        assert not (folder / "long.parquet.journal").exists()
        assert all(load_trace(path).whole for path in paths)
        assert paths[2].stat().st_mtime_ns == stamps[2]
        # AND with force all are
        done.clear()
        run(*arguments, folder=folder, force=True)
        assert done == ["long", "short", "middle"]
        assert paths[2].stat().st_mtime_ns > stamps[2]
    finally:
        _Job.run = job_run


def _leave_a_journal(path, like):
    """Leave what a kill in the middle of a recording leaves."""
    with Journal.create(path, like.layout, {"prompt_length": 1}) as journal:
        journal.append_tokens(TokenBlock(0, np.zeros(1, np.int32), [b"x"], np.ones(1), np.ones(1)))
        for layer in like.layout.layers:
            heads, group, size = len(layer.kv_heads), layer.group_size, layer.key_size
            query = np.zeros((1, heads, group, size), np.float32)
            number, hits = np.zeros((1, heads, group)), np.zeros((1, heads, group, like.layout.hits))
            journal.append(
                HeadBlock(
                    layer.layer,
                    0,
                    query,
                    query[:, :, 0],
                    query[:, :, 0],
                    number,
                    number,
                    number,
                    number,
                    number,
                    hits,
                    hits,
                )
            )
    assert journal_path(path).exists()


def _cut(path):
    """Put a trace there that was interrupted."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    metadata[b"beaconscope"] = metadata[b"beaconscope"].replace(b'"whole": true', b'"whole": false')
    layout = load_trace(path).layout
    assert len(layout.layers) == 2
    with pq.ParquetWriter(path, table.schema.with_metadata(metadata)) as writer:
        for layer in (0, 1):
            for head in (0, 1):
                part = table.filter(
                    np.logical_and(np.array(table["layer"]) == layer, np.array(table["kv_head"]) == head)
                )
                writer.write_table(part)


def test_a_foreign_file_in_the_folder_is_not_replaced(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "short.parquet").write_bytes(b"precious")
    with pytest.raises(BeaconScopeError, match="--force"):
        run(tiny_model(), endless_tokenizer(), PROMPTS, options(max_new_tokens=4), folder=folder)
    assert [path.name for path in folder.iterdir()] == ["short.parquet"]
    assert (folder / "short.parquet").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("prompts", "changes", "says"),
    [
        ([Prompt("a", "x"), Prompt("A", "y")], {}, "two prompts have the id 'A'"),
        ([Prompt("../a", "x")], {}, "cannot name a file"),
        ([Prompt("a" * 300, "x")], {}, "cannot name a file"),
        ([Prompt("a", "x")], {"batch_size": 0}, "batch-size is 0"),
    ],
)
def test_what_cannot_be_is_refused(prompts, changes, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        run(tiny_model(), endless_tokenizer(), prompts, options(), folder=tmp_path / "f", **changes)
    assert not (tmp_path / "f").exists()


def test_a_prompt_that_does_not_fit_is_named_and_leaves_no_folder(tmp_path):
    model = tiny_model(max_position_embeddings=12)
    with pytest.raises(BeaconScopeError, match="prompt long: the prompt has 44 tokens, but the model's context is 12"):
        run(model, endless_tokenizer(), PROMPTS, options(), folder=tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_chunks_and_a_batch_of_different_lengths_exclude_each_other(tmp_path):
    with pytest.raises(UsageError, match="give --batch-size 1"):
        run(tiny_model(), endless_tokenizer(), PROMPTS, options(prefill_chunk=8), folder=tmp_path / "f", batch_size=3)
    paths = run(tiny_model(), endless_tokenizer(), PROMPTS, options(prefill_chunk=8), folder=tmp_path / "f")
    assert load_trace(paths[0]).metadata["prefill_passes"] == [8, 8, 8, 8, 8, 4]


SAMPLED = {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3}


@pytest.mark.parametrize("changes", [{"temperature": 1.0}, SAMPLED], ids=["plain", "all"])
def test_sampling_is_repeated_by_its_seed_alone_or_in_a_batch(changes, tmp_path):
    def tokens(seed, size, name):
        settings = options(sampling=Sampling(**changes, seed=seed), max_new_tokens=30)
        paths = run(tiny_model(), endless_tokenizer(), PROMPTS, settings, folder=tmp_path / name, batch_size=size)
        return [token_ids(load_trace(path)) for path in paths]

    alone = tokens(5, 1, "alone")
    torch.manual_seed(1234)  # nothing hangs on the global stream
    assert tokens(5, 3, "together") == alone
    assert tokens(6, 1, "other") != alone


def test_a_penalty_for_repetition_knows_the_prompt_and_not_the_padding(tmp_path):
    from transformers import RepetitionPenaltyLogitsProcessor

    sampling = Sampling(temperature=1, top_k=1, repetition_penalty=1.8)  # top-k of one is greedy after the penalty
    paths = run(
        tiny_model(),
        endless_tokenizer(),
        PROMPTS,
        options(policy=Full(), sampling=sampling, max_new_tokens=20),
        folder=tmp_path / "f",
        batch_size=3,
    )
    penalty = RepetitionPenaltyLogitsProcessor(1.8)
    for path in paths:
        trace = load_trace(path)
        ids = torch.tensor([token_ids(trace)])
        with torch.no_grad():
            logits = tiny_model()(ids).logits
        for position in range(trace.prompt_length, trace.length):
            expected = penalty(ids[:, :position], logits[:, position - 1].clone()).argmax()
            assert int(ids[0, position]) == int(expected)


def test_an_end_token_of_the_tokenizer_ends_a_text_too(tmp_path):
    free = record_tiny(tiny_model(), tmp_path, policy=Full(), max_new_tokens=20)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(token_ids(free)[free.prompt_length + 5])
    paths = run(
        tiny_model(),
        tokenizer,
        [Prompt("a", free.prompt)],
        options(policy=Full(), max_new_tokens=20),
        folder=tmp_path / "f",
    )
    trace = load_trace(paths[0])
    assert trace.length - trace.prompt_length <= 6
    assert trace.whole
