"""Which ranks do what: the records that the allocation grammar (`allocation.py`) gives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

LETTERS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


@dataclass(frozen=True)
class Dimensions:
    """Degrees of parallelism. Of a plain part, `expert` is carved out of data, tensor and context and adds no ranks."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """Ranks of a plain or attention layout."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def feed_forward_size(self) -> int:
        """Ranks of the `ffn` half of a hybrid: there the experts are a dimension of their own."""
        return self.data * self.tensor * self.pipeline * self.expert

    def degree(self, letter: str) -> int:
        """The number after a letter of the grammar."""
        degree: int = getattr(self, LETTERS[letter])
        return degree

    def __str__(self) -> str:
        return "".join(
            f"{letter}{self.degree(letter)}" for letter in LETTERS if letter == "d" or self.degree(letter) > 1
        )


@dataclass(frozen=True)
class Part:
    """One engine on its ranks."""

    engine: str
    role: str
    """`rollout`, `actor`, or another name of a trainer part."""
    dimensions: Dimensions
    """Of a hybrid: the attention layers'."""
    feed_forward: Dimensions | None = None
    """Of a hybrid: the feed-forward (expert) layers'."""
    ranks: tuple[int, ...] = ()
    """World ranks, contiguous and ascending."""

    @property
    def size(self) -> int:
        return self.dimensions.size

    @property
    def instances(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each model instance (the data dimension counts instances); the first of each leads it."""
        size = self.size // self.dimensions.data
        return tuple(self.ranks[start : start + size] for start in range(0, len(self.ranks), size))

    def __str__(self) -> str:
        name = "" if self.role in ("rollout", "actor") else f"[{self.role}]"
        if self.feed_forward is None:
            return f"{self.engine}{name}:{self.dimensions}"
        return f"{self.engine}{name}:(attn:{self.dimensions}|ffn:{self.feed_forward})"


@dataclass(frozen=True)
class Placement:
    """Which world ranks do what. `str()` gives a text that parses to an equal placement."""

    parts: tuple[Part, ...]
    """In the order of their ranks."""

    @cached_property
    def actor(self) -> Part:
        return next(part for part in self.parts if part.role == "actor")

    @cached_property
    def rollout(self) -> Part | None:
        return next((part for part in self.parts if part.role == "rollout"), None)

    @cached_property
    def trainer_ranks(self) -> tuple[int, ...]:
        """Ranks of all trainer parts, ascending, from 0."""
        return tuple(sorted({rank for part in self.parts if part.role != "rollout" for rank in part.ranks}))

    @property
    def rollout_ranks(self) -> tuple[int, ...]:
        return self.rollout.ranks if self.rollout else ()

    @property
    def rollout_leaders(self) -> tuple[int, ...]:
        """The rank of each rollout instance that runs workflows; the others lend their device."""
        return tuple(ranks[0] for ranks in self.rollout.instances) if self.rollout else ()

    def tasks_of(self, rank: int) -> tuple[str, ...]:
        """`roles_of`, but none for a rank that only lends its device to an engine: what a rank has to prepare for."""
        lends = rank in self.rollout_ranks and rank not in self.rollout_leaders
        return () if lends else self.roles_of(rank)

    @property
    def rollout_shares_ranks(self) -> bool:
        """Some ranks both train and roll out; never so in an attached world, which has no trainer."""
        return bool(set(self.rollout_ranks) & set(self.trainer_ranks))

    @property
    def colocated(self) -> bool:
        """Rollout runs on the actor's ranks; never so in an attached world."""
        return any(part.role == "actor" and part.ranks == self.rollout_ranks for part in self.parts)

    @property
    def world_size(self) -> int:
        return 1 + max(rank for part in self.parts for rank in part.ranks)

    def roles_of(self, rank: int) -> tuple[str, ...]:
        """`trainer`, `rollout` or both; raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size} ranks (allocation {self})")
        roles = (("trainer", self.trainer_ranks), ("rollout", self.rollout_ranks))
        return tuple(role for role, ranks in roles if rank in ranks)

    def __str__(self) -> str:
        groups: dict[tuple[int, ...], list[str]] = {}
        for part in self.parts:
            groups.setdefault(part.ranks, []).append(str(part))
        return "+".join("|".join(texts) for texts in groups.values())
