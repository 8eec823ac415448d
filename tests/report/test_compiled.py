"""What UMAP compiles is kept from one process to the next."""

from __future__ import annotations

import subprocess
import sys

import pytest

from beaconscope.report.compiled import load_umap

_SECOND = """
from beaconscope.report.space import compile_umap
compile_umap()
import umap.layouts, umap.umap_
for each in (umap.umap_.smooth_knn_dist, umap.umap_.compute_membership_strengths,
             umap.layouts._nb_optimize_layout_euclidean_single_epoch):
    assert each.signatures
    assert sum(each.stats.cache_hits.values()) == len(each.signatures), each
    assert not each.stats.cache_misses, each
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing() -> None:
    # GIVEN a process that has laid out queries
    first = "from beaconscope.report.space import compile_umap; compile_umap()"
    subprocess.run([sys.executable, "-c", first], check=True)
    # WHEN another does
    # THEN it finds all that took long to compile
    subprocess.run([sys.executable, "-c", _SECOND], check=True)


def test_umap_works_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba.core.dispatcher
    import umap  # noqa: F401, which keeps some code of its own when it is imported

    def refuse(self: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(numba.core.dispatcher.Dispatcher, "enable_caching", refuse)
    assert load_umap.__wrapped__().UMAP
