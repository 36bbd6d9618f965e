"""Answers made to hurt: huge powers, deep nesting, megabytes, null bytes. Real workers, real
deadlines."""

from __future__ import annotations

import pytest

from megatron_stare.rewards.verifier_pool import Verdict, VerifierPool

MEGABYTE = 1_000_000
HANGS = {
    "a tower of powers": (r"\boxed{9^{9^{9^9}}}", "9"),
}
SLOW_HANGS = {
    "factorials of factorials": (r"\boxed{((5!)!)!}", "1"),
    "an endless sum": (r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k^{k}}}", "7"),
    "brackets in brackets": (rf"\boxed{{{'(' * 450}1{')' * 450}}}", "1.5"),
    "an exponent of nine digits": (r"\boxed{1e999999999}", "1"),
    "an expansion": (r"\boxed{(x+y+z+w)^{300}}", "x^2+y"),
}
WRONG = {
    "braces in braces": (rf"\boxed{{{'{' * 50_000}1{'}' * 50_000}}}", "1"),
    "fractions in fractions": ("\\boxed{" + r"\frac{1}{" * 2_000 + "2" + "}" * 2_001, "1"),
    "a number of a megabyte": (rf"\boxed{{{'7' * MEGABYTE}}}", "7"),
    "boxes without end": (r"\boxed{" * 150_000, "7"),
    "backslashes": (rf"\boxed{{{chr(92) * MEGABYTE}}}", "7"),
    "fonts in fonts": ("\\boxed{" + r"\text{" * 190 + "}" * 191, r"\text{a}"),
    "null bytes and the wrong answer": ("\0" * MEGABYTE + r"\boxed{8}", "7"),
    "half a character": ("\\boxed{\ud800}", "7"),
}
RIGHT = {
    "null bytes in the box": ("\\boxed{\0007\0}", "7"),
    "a megabyte before the box": ("x" * MEGABYTE + r"\boxed{7}", "7"),
    "dollars": ("$" * MEGABYTE + r"\boxed{7}", "7"),
}


def judge(hangs, workers):
    texts = [*hangs.values(), *WRONG.values(), *RIGHT.values()]
    with VerifierPool("math", workers=workers, timeout_s=2) as pool:
        verdicts = dict(zip([*hangs, *WRONG, *RIGHT], pool.verify(texts), strict=True))
        assert (
            pool.verify([(r"\boxed{42}", "42")] * 20)
            == [Verdict(1.0, "ok", answer_at=0, answer="42")] * 20
        )
        return verdicts


def test_the_deadline_holds_and_the_pool_lives_on():
    verdicts = judge(HANGS, workers=1)
    assert {name: verdicts[name].status for name in HANGS} == dict.fromkeys(HANGS, "timeout")
    assert {name: verdicts[name].reward for name in WRONG} == dict.fromkeys(WRONG, 0.0)
    assert {name: verdicts[name].reward for name in RIGHT} == dict.fromkeys(RIGHT, 1.0)


@pytest.mark.slow
def test_the_deadline_holds_for_more_that_hang():
    verdicts = judge(SLOW_HANGS, workers=2)
    assert {name: verdicts[name].status for name in SLOW_HANGS} == dict.fromkeys(
        SLOW_HANGS, "timeout"
    )
