"""What the figures of a filesystem's trial mean for a run, and what to do where they are bad."""

from __future__ import annotations

from collections.abc import Iterator

from pekoe.launch.doctor.filesystem_trial import VISIBLE_SECONDS, FilesystemFacts
from pekoe.launch.doctor.quota import NEARLY, used_share
from pekoe.pipeline.runs.finding import Finding, counted, note, ok, problem

AREA = "shared filesystem"
SLOW_NAMES = 1.0
"""A name that comes so late (seconds) slows a run, which waits for it."""
SKEW, GROSS_SKEW = 2.0, 30.0
FEW_BYTES, FEW_FILES = 10 << 30, 100_000
SLOW_FILES = 20.0
"""Small files a second."""
ELSEWHERE = "set cluster.fileroot to a folder on the shared filesystem that all nodes mount"
CACHING = (
    "the mount caches names for long: ask for a shorter time (NFS: actimeo=1 or lookupcache=positive), "
    "or another cluster.fileroot"
)


def judge(facts: FilesystemFacts) -> list[Finding]:
    """In the order in which one finding explains the next."""
    where = f"between {facts.writer} and {facts.watcher}"
    if facts.writer == facts.watcher:
        where = f"between two processes of {facts.writer}"
    title = f"{facts.root} ({facts.kind or 'kind not known'}), {where}"
    if facts.error:
        step = f"see that you may write there (ls -ld {facts.root}), or {ELSEWHERE}"
        return [problem(AREA, f"{title}: cannot be tried: {facts.error}", step), *_clock(facts)]
    if facts.folder_seconds is None:
        text = (
            f"{title}: a folder made on {facts.writer} was not seen on {facts.watcher} within {VISIBLE_SECONDS:.0f} s"
        )
        step = f"it is not shared, or caches names for long: {ELSEWHERE}"
        return [problem(AREA, text, step), *_room(facts), *_clock(facts)]
    found = [ok(AREA, title)] if not facts.bulk_error else []
    found += _room(facts)
    if not facts.bulk_error:
        found += [*_names(facts), *_replacing(facts), *_claims(facts), *_locks(facts), *_shard(facts)]
    return found + list(_clock(facts))


def _names(facts: FilesystemFacts) -> Iterator[Finding]:
    if facts.mode not in ("0o700", ""):
        text = f"a folder made with 0700 has {facts.mode}: others may read run directories"
        yield note(AREA, text, "ask the site how to keep a folder private, or use another cluster.fileroot")
    if not facts.whole:
        text = "a renamed file was seen before all of its content"
        yield problem(AREA, text, f"no rename here is atomic: {ELSEWHERE}")
    delays = {
        "a new folder": facts.folder_seconds,
        "a renamed file": facts.name_seconds,
        "a new name in a listing": facts.list_seconds,
        "the new content of a replaced file": facts.replaced_seconds,
    }
    unseen = [name for name, seconds in delays.items() if seconds is None]
    late = [f"{name} after {seconds:.1f} s" for name, seconds in delays.items() if seconds and seconds > SLOW_NAMES]
    if unseen:
        yield problem(AREA, f"not seen by the other rank within {VISIBLE_SECONDS:.0f} s: {', '.join(unseen)}", CACHING)
    if late:
        yield note(AREA, f"late for the other rank: {', '.join(late)}; ranks wait for it", CACHING)
    if not unseen and not late:
        worst = max(seconds for seconds in delays.values() if seconds is not None)
        yield ok(AREA, f"new names and contents are seen by the other rank within {worst * 1000:.1f} ms")
    if facts.sync_folder in ("EINVAL", "ENOTSUP"):
        yield ok(AREA, f"folders cannot be fsynced ({facts.sync_folder}); Pekoe accepts that")
    elif facts.sync_folder:
        yield problem(AREA, f"fsync of a folder fails: {facts.sync_folder}", ELSEWHERE)


def _replacing(facts: FilesystemFacts) -> Iterator[Finding]:
    if facts.torn:
        text = f"{facts.torn} of {counted(facts.reads, 'read')} of a file under replacement gave a mixture"
        yield problem(AREA, text, f"rename is not atomic here: {ELSEWHERE}")
    gone = facts.missing + facts.stale
    if gone:
        text = (
            f"{gone} of {counted(facts.reads, 'read')} of a file under replacement found none ({facts.missing} ENOENT, "
            f"{facts.stale} ESTALE)"
        )
        yield note(AREA, f"{text}; Pekoe reads again for some seconds")
    if not facts.torn and not gone and facts.reads:
        yield ok(AREA, f"rename is atomic: {counted(facts.reads, 'read')} of a file under replacement, each whole")


def _claims(facts: FilesystemFacts) -> Iterator[Finding]:
    twice, lost = facts.exclusive_twice + facts.claimed_twice, facts.exclusive_lost + facts.claimed_lost
    if facts.exclusive_twice or facts.claimed_twice:
        text = (
            f"both ranks won the same claim: {facts.exclusive_twice} times by O_EXCL, {facts.claimed_twice} times by "
            "rename"
        )
        step = f"two attempts or two worlds may take the same thing: {ELSEWHERE}"
        yield problem(AREA, text, step)
    if lost:
        text = f"nobody won {lost} claims ({facts.exclusive_lost} by O_EXCL, {facts.claimed_lost} by rename)"
        yield problem(AREA, text, ELSEWHERE)
    if not twice and not lost:
        yield ok(AREA, "claims by O_EXCL and by rename have exactly one winner")


def _locks(facts: FilesystemFacts) -> Iterator[Finding]:
    if facts.locks and all(word == "excludes" for word in facts.locks.values()):
        yield ok(AREA, "flock and fcntl locks exclude; Pekoe takes none")
    elif facts.locks:
        words = "; ".join(f"{name} {word}" for name, word in facts.locks.items())
        meaning = "a lock that pretends lets both in" if "pretends" in facts.locks.values() else ""
        yield note(
            AREA,
            f"locks between ranks: {words}{f' ({meaning})' if meaning else ''}. Pekoe takes none",
            "other programs on this filesystem may: keep HF_HOME filled before the run, caches on local disks",
        )


def _shard(facts: FilesystemFacts) -> Iterator[Finding]:
    if facts.shard:
        text = f"a shard written on {facts.writer} is not read on {facts.watcher}: {facts.shard}"
        yield problem(AREA, text, ELSEWHERE)
    else:
        yield ok(AREA, "a shard (HDF5, locking off) written by one rank is verified by the other")


def _room(facts: FilesystemFacts) -> Iterator[Finding]:
    files = "" if facts.free_files is None else f", {facts.free_files:,} files"
    free = f"{facts.free_bytes / 2**30:,.1f} GiB{files} free"
    share = used_share(facts.quota) if facts.quota else None
    if facts.bulk_error:
        text = f"{facts.root}: writing fails: {facts.bulk_error} ({free})"
        if facts.quota:
            text += f"\n{facts.quota}"
        yield problem(
            AREA, text, "make room or ask for a larger quota; old runs: du -sh RUN, pekoe export RUN, rm -r RUN"
        )
        return
    bulk, small = facts.bulk_bytes_per_second or 0.0, facts.small_files_per_second or 0.0
    text = f"{free}; {bulk / 1e6:,.0f} MB/s, {small:,.0f} small files a second, each durable"
    scarce = facts.free_bytes < FEW_BYTES or (facts.free_files is not None and facts.free_files < FEW_FILES)
    if share is not None and share > NEARLY:
        text = f"{share:.0%} of a quota are used\n{facts.quota}"
        yield note(AREA, text, "make room or ask for more: a full quota pauses a run (cluster.full_disk_seconds)")
    elif scarce:
        yield note(
            AREA, text, "a full disk pauses a run: `pekoe doctor CLUSTER CONFIG` and the run's start say what it needs"
        )
    elif small < SLOW_FILES:
        yield note(
            AREA,
            text,
            "small files are slow here: fewer, larger shards (rollout.shard_max_seconds), or another cluster.fileroot",
        )
    else:
        yield ok(AREA, text)


def _clock(facts: FilesystemFacts) -> Iterator[Finding]:
    worst = max(facts.skew.items(), key=lambda item: abs(item[1]), default=None)
    if worst is None:
        return
    host, skew = worst
    apart = max(0.0, abs(skew) - facts.skew_error)
    step = "ask the site to look at its time service (chrony, ntpd)"
    if apart > GROSS_SKEW:
        yield problem(AREA, f"the clock of {host} is {skew:+.1f} s from {facts.writer}'s", step)
    elif apart > SKEW:
        yield note(
            AREA, f"the clock of {host} is {skew:+.1f} s from {facts.writer}'s: times in logs do not agree", step
        )
    if facts.server_skew is not None and abs(facts.server_skew) > SKEW:
        yield note(AREA, f"the file server's clock is {facts.server_skew:+.1f} s from {facts.writer}'s", step)
    elif apart <= SKEW:
        yield ok(AREA, f"clocks agree within {abs(skew) + facts.skew_error:.2f} s")
