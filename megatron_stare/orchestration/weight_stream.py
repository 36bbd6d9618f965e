"""The driver's view of the weights on their way from the trainer to whoever takes them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_stare.weights.stream_plan import BucketLayout
from megatron_stare.workers import Handle, Workers


class WeightStream:
    """One pass over the policy's weights, bucket by bucket, as handles that workers can take.

    Consumes the trainer ranks' `begin_weight_stream`, `next_bucket` and `end_weight_stream`. The next bucket is asked
    for before the one at hand is given out, so the ranks gather it meanwhile; at most three buckets are alive, a third
    while the caller still holds the last one.

    Args:
        layouts: what the buckets hold, in order.
    """

    def __init__(self, trainers: Workers, layouts: tuple[BucketLayout, ...]) -> None:
        self._trainers = trainers
        self.layouts = layouts

    def buckets(self, checksums: bool = True) -> Iterator[tuple[Handle, list[Handle]]]:
        """Each bucket, and the calls of the other ranks that it needs: wait for them together with the bucket's use, so
        that an error of any rank is seen at once. Can be gone through once.

        Args:
            checksums: compute what `checksums` gives.
        """
        self._trainers.call("begin_weight_stream", checksums)
        ahead = self._trainers.start("next_bucket")
        for number in range(len(self.layouts)):
            bucket, *others = ahead
            ahead = self._trainers.start("next_bucket") if number + 1 < len(self.layouts) else []
            yield bucket, others

    def checksums(self) -> dict[str, str]:
        """Of every tensor that was sent, by name, "" where none were computed; after the last bucket."""
        return self._trainers.call("end_weight_stream")[0]
