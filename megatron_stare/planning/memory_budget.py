"""What a GPU holds in each phase of a step, and whether that fits: sums of numbers that others have found.

`Needs` are bytes of what may lie on the fullest GPU of a kind; who is there when is docs/colocation.md's table.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

# CUDA's context, libraries' and NCCL's buffers, and what an allocator cannot give out, of a process. An assumption:
# nothing here has been measured on a GPU.
PROCESS_BYTES = 1_500_000_000

ITEMS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "main parameters, moments",
    "reference": "reference policy",
    "forward": "activations, log-probs",
    "activations": "activations, update",
    "logits": "logits",
    "buckets": "buckets of the sync",
    "served": "servers' weights",
    "cache": "servers' cache",
    "processes": "CUDA, NCCL (assumed)",
}
# what a phase needs, by colocated or not; where it is not, a rollout is on a GPU of the servers' own
_PHASES: dict[str, tuple[str, ...]] = {
    "rollout": ("served", "cache"),
    "log_probs": ("parameters", "reference", "forward", "logits"),
    "update": ("parameters", "gradients", "optimizer", "reference", "activations", "logits"),
    "sync": ("parameters", "buckets", "served"),
    "canary": ("parameters", "served", "cache"),
    "checkpoint": ("parameters", "optimizer", "served"),
}
_TRAINER = ("parameters", "gradients", "optimizer", "reference")
_STAYS = {"all": (), "optimizer": ("parameters", "reference"), "none": _TRAINER}


@dataclass(frozen=True)
class Needs:
    """Bytes on one GPU.

    optimizer: main parameters and moments.
    reference: 0 where there is none; reference_moves: whether it is on the device in its pass alone.
    forward: activations of a pass without backward; activations: those kept for backward, and made again.
    buckets: of the weight sync.
    served: a server rank's weights; cache: its key/value cache.
    """

    parameters: int
    gradients: int
    optimizer: int
    reference: int
    forward: int
    activations: int
    logits: int
    buckets: int
    served: int
    cache: int
    reference_moves: bool = False


@dataclass(frozen=True)
class Budget:
    """By phase and item, bytes; `capacity` of a GPU."""

    phases: dict[str, dict[str, int]]
    capacity: int

    def total(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def over(self) -> list[str]:
        """The phases that do not fit."""
        return [phase for phase in self.phases if self.total(phase) > self.capacity]

    @property
    def cache_room(self) -> int:
        """The largest cache with which every phase that has one fits; below 0: none does."""
        with_cache = [phase for phase, items in self.phases.items() if "cache" in items]
        return min(self.capacity - self.total(phase) + self.phases[phase]["cache"] for phase in with_cache)

    def table(self) -> str:
        """A row an item, a column a phase, GB (10^9 bytes)."""
        rows = [["GB", *self.phases]]
        for item, name in ITEMS.items():
            found = [items.get(item) for items in self.phases.values()]
            if any(found):
                rows.append([name] + ["" if nbytes is None else f"{nbytes / 1e9:.1f}" for nbytes in found])
        rows.append([f"together, of {self.capacity / 1e9:.1f}"] + [f"{self.total(p) / 1e9:.1f}" for p in self.phases])
        lines = (f"{first:26}" + "".join(f"{cell:>11}" for cell in cells) for first, *cells in rows)
        return "\n".join(line.rstrip() for line in lines)


def budget(needs: Needs, capacity: int, *, colocated: bool, offload: str) -> Budget:
    """What the GPU holds in each phase.

    Args:
        capacity: of the GPU, bytes.
        colocated: the servers are on it too; else `rollout` is of a GPU of theirs.
        offload: `memory.offload` of the configuration, which counts where colocated.
    """
    sizes = {**asdict(needs), "processes": PROCESS_BYTES * (2 if colocated else 1)}
    stays = _STAYS[offload] if colocated else _TRAINER
    phases: dict[str, dict[str, int]] = {}
    for phase, wanted in _PHASES.items():
        items = {*wanted, *stays, "processes"}
        if not colocated and phase in ("canary", "checkpoint"):
            continue  # no more than `sync` and `update`
        if not colocated:
            items -= set(_TRAINER) if phase == "rollout" else {"served", "cache"}
        if (needs.reference_moves and phase != "log_probs") or not needs.reference:
            items -= {"reference"}
        phases[phase] = {item: sizes[item] for item in ITEMS if item in items}
    return Budget(phases, capacity)
