"""The most that this process held, counted anew whenever it is asked."""

import mmap

from megatron_stare.process.memory import take_peak_bytes

SIZE = 200_000_000


def test_the_peak_is_of_the_time_since_it_was_asked():
    take_peak_bytes()
    before = take_peak_bytes()
    # the heap may hold as much, freed by whatever ran in this process before
    with mmap.mmap(-1, SIZE) as pages:
        for start in range(0, SIZE, mmap.PAGESIZE):
            pages[start] = 1
    peak, after = take_peak_bytes(), take_peak_bytes()
    assert 0.9 * SIZE < peak - before < 1.2 * SIZE
    assert after - before < 0.1 * SIZE
