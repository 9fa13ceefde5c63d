"""Groups that earlier attempts have published, kept until the cursor comes to them: adoption is a way to be admitted.

    resume: the notices of valid shards ─► put ─► admission asks for each group before it is issued ─► take
                                               └► too old by now, or passed over ─► drop_useless

So adopted groups take the same slots, in the same order, as those that are sampled again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from pekoe.pipeline.messages import Published, PublishedGroup


class Shelf:
    """Owned by the dispatcher. `longest`: tokens that a row may have to fit into a micro-batch."""

    def __init__(self, eta: int | None, longest: int) -> None:
        self._eta, self._longest = eta, longest
        self._groups: dict[int, tuple[str, PublishedGroup]] = {}
        self._shards: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def put(
        self, notices: Iterable[Published], version: int, tries: Mapping[int, int], is_closed: Callable[[int], bool]
    ) -> None:
        """The first copy of a group counts. Left out are groups that have ended, those of an earlier try than `tries`
        says, those that do not fit (smaller limits than before), and those too old for the step at `version`."""
        for notice in notices:
            for published in notice.groups:
                number = published.group
                fits = all(row.length <= self._longest for row in published.rows)
                is_past = is_closed(number) or published.try_number < tries.get(number, 0)
                if number not in self._groups and fits and not is_past and not self._is_stale(published, version):
                    self._groups[number] = (notice.path, published)
                    self._shards[notice.path] += 1

    def take(self, number: int) -> tuple[str, PublishedGroup] | None:
        """The shard and notice of a group that is to be admitted now."""
        found = self._groups.pop(number, None)
        if found is not None:
            self._shards[found[0]] -= 1
            if not self._shards[found[0]]:
                del self._shards[found[0]]
        return found

    def drop_useless(self, version: int, is_closed: Callable[[int], bool]) -> None:
        """Forgets what is too old for the step at `version`, and what was passed over."""
        for number in [n for n, (_, one) in self._groups.items() if self._is_stale(one, version) or is_closed(n)]:
            self.take(number)

    def drop_shard(self, shard: str) -> None:
        """Forgets what lies in a shard that cannot be read."""
        for number in [number for number, (path, _) in self._groups.items() if path == shard]:
            self.take(number)

    def shards(self) -> set[str]:
        """Shards in which groups on the shelf lie."""
        return set(self._shards)

    def _is_stale(self, published: PublishedGroup, version: int) -> bool:
        return self._eta is not None and version - oldest_version(published) > self._eta


def oldest_version(published: PublishedGroup) -> int:
    """Of the group's tokens."""
    return min(row.min_version for row in published.rows)
