"""One pass over a head against attention, sentences and distances computed the long way."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kurtosis

from beaconscope import load_trace
from beaconscope.analyze.attention import HeadAttention, LayerFacts, evicted_at, layer_facts
from beaconscope.analyze.heads import retrieval_score, vertical_kurtosis
from beaconscope.analyze.scan import find_sinks, scan
from beaconscope.analyze.sentences import sentences_of, split_sentences
from tests.analyze.made import Plan, plant

SMALL = Plan(length=150, prompt_length=20, layers=1, kv_heads=1, group=2, size=48)


def whole_attention(head, scaling: float) -> np.ndarray:
    """[G, T, T] by plain softmax in double precision."""
    query, key = head.query.astype(np.float64), head.key.astype(np.float64)
    logits = np.einsum("tgd,sd->gts", query, key) * scaling
    logits = np.where(np.tril(np.ones(logits.shape[1:], bool)), logits, -np.inf)
    weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("scan") / "trace.parquet"
    gone = np.arange(5, 30, dtype=np.int32)
    plant(path, SMALL, evictions={70: gone[:10], 100: gone[10:]})
    trace = load_trace(path)
    head = trace.head(0, 0)
    sentences = sentences_of(trace.tokens)
    attention = HeadAttention(head, layer_facts(trace, 0))
    at = evicted_at(trace, 0, 0)
    window, sinks = 20, [[0], []]
    return head, sentences, window, at, scan(attention, sentences, window, sinks, at)


def test_masses_are_those_of_the_whole_matrix(made):
    head, _, window, at, scanned = made
    weight = whole_attention(head, 48**-0.5)
    back = np.arange(150)[:, None] - np.arange(150)
    for group, sinks in enumerate([[0], []]):
        own = weight[group].copy()
        assert np.allclose(scanned.sink[group], own[:, sinks].sum(axis=1), atol=1e-6)
        own[:, sinks] = 0
        assert np.allclose(scanned.local[group], np.where(back <= window, own, 0).sum(axis=1), atol=1e-6)
        far = np.where(back > window, own, 0)
        assert np.allclose(scanned.distant[group], far.sum(axis=1), atol=1e-6)
        assert np.array_equal(scanned.top[group], own.argmax(axis=1))
        lost = far * (at[None, :] < np.arange(150)[:, None])
        assert np.allclose(scanned.lost[group], lost.sum(axis=1), atol=1e-6)
        place = far.argmax(axis=1)
        around = np.abs(np.arange(150) - place[:, None]) <= 4
        assert np.allclose(scanned.peak[group], (far * around).sum(axis=1), atol=1e-6)


def test_the_distance_profile_is_that_of_the_whole_matrix(made):
    head, _, _, _, scanned = made
    weight = whole_attention(head, 48**-0.5)
    weight[0, :, 0] = 0
    edges = [0, 2, 4, 8, 16, 32, 64, 128]
    for group in range(2):
        by_distance = [np.diagonal(weight[group], -d).sum() for d in range(150)]
        expected = [sum(by_distance[a:b]) / 150 for a, b in zip(edges, [*edges[1:], 150], strict=True)]
        assert np.allclose(scanned.distance[group], expected, atol=1e-6)


def test_the_vertical_score_is_that_of_thought_anchors(made):
    head, sentences, _, _, scanned = made
    weight = whole_attention(head, 48**-0.5)
    count = len(sentences)
    for group in range(2):
        matrix = np.full((count, count), np.nan)
        for i in range(count):
            for j in range(i + 1):
                rows = slice(sentences.start[i], sentences.stop[i])
                matrix[i, j] = weight[group, rows, sentences.start[j] : sentences.stop[j]].mean()
        expected = [matrix[j + 4 :, j].mean() for j in range(count - 4)]
        assert np.allclose(scanned.vertical[group, : count - 4], expected, atol=1e-6)
        assert np.isnan(scanned.vertical[group, count - 4 :]).all()
        assert vertical_kurtosis(scanned.vertical[group]) == pytest.approx(kurtosis(expected), abs=1e-4)


def test_softcap_window_and_learned_sinks_are_the_model_s(tmp_path):
    plant(tmp_path / "t.parquet", SMALL)
    head = load_trace(tmp_path / "t.parquet").head(0, 0)
    facts = LayerFacts(0.2, 3.0, [[1.0, -1.0]], 40, False)
    weight = HeadAttention(head, facts).block(60, 70)
    query, key = head.query[65, 1].astype(np.float64), head.key[:66].astype(np.float64)
    logits = 3.0 * np.tanh(key @ query * 0.2 / 3.0)
    logits[: 65 - 39] = -np.inf
    power = np.exp(logits)
    assert np.allclose(weight[1, 5, :66], power / (power.sum() + np.exp(-1.0)), atol=1e-6)


def test_what_sees_missing_keys_only_is_missing_and_spoils_nothing(tmp_path):
    def spoil(query, key):
        key[0] = np.nan
        query[100:110, 0, 0, 1] = np.nan

    plant(tmp_path / "t.parquet", SMALL, spoil=spoil)
    trace = load_trace(tmp_path / "t.parquet")
    sentences = sentences_of(trace.tokens)
    attention = HeadAttention(trace.head(0, 0), layer_facts(trace, 0))
    scanned = scan(attention, sentences, 20, [[], []], None)
    assert attention.missing == (10, 1)
    assert scanned.top[:, 0].tolist() == [-1, -1]
    assert np.isfinite(scanned.vertical[:, :-4]).all()
    # The rows that are there attend with all they have.
    assert np.allclose(scanned.distance.sum(axis=1), 1.0, atol=1e-6)
    # Under a window of one position each query sees its own key only.
    alone = HeadAttention(trace.head(0, 0), LayerFacts(0.2, None, None, 1, False))
    assert alone.missing_query[0].nonzero().tolist() == [[0]]


def test_only_positions_that_always_draw_are_sinks(tmp_path):
    plant(tmp_path / "t.parquet", Plan(strength=16, rate=0.3, targets=1))
    trace = load_trace(tmp_path / "t.parquet")
    found = find_sinks(HeadAttention(trace.head(0, 0), layer_facts(trace, 0)), 50, 0.02)
    assert found == [[0], [0]]


def test_a_copied_token_counts_once():
    token_id = np.array([7, 8, 1, 1, 1, 7, 1, 8, 7])
    # GIVEN a head that looks at position 0 when it writes 7, and elsewhere when it writes 8
    top = np.array([0, 0, 0, 0, 0, 3, 2, 0, 0])
    # THEN it copied one of the three tokens that are written and also stand more than two back
    assert retrieval_score(top, token_id, 2, 2) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("tokens", "starts"),
    [
        ([" One", " two", ".", " Three", ".", "\n\n", " Four"], [0, 3, 6]),
        ([" is", " 3", ".", "14", " or", " so", "."], [0]),
        (["step", "01", ".", "so", "f", "."], [0, 3]),
        ([" He", " said", ' "no', ".", '"', " Then"], [0, 5]),
        ([], []),
    ],
)
def test_sentences_end_where_a_reader_ends_them(tokens, starts):
    found = split_sentences(tokens, ["think"] * len(tokens))
    assert found.start.tolist() == starts
    assert len(found.of) == len(tokens)


def test_a_new_phase_is_a_new_sentence():
    assert split_sentences([" a", " b"], ["think", "answer"]).start.tolist() == [0, 1]
