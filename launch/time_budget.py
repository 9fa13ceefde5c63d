"""When the job ends, so that a run saves in time. Decided by the head alone and given to all: clocks may disagree.

auto              what Slurm says (SLURM_JOB_END_TIME), else nothing
a duration        counted from the job's real start (SLURM_JOB_START_TIME), else from the attempt's; never later
                  than what Slurm says, since the job ends then in any case
null              nothing
"""

from __future__ import annotations

from pekoe.launch.environment import Facts
from pekoe.pipeline.config.durations import FORMS, duration_seconds

AUTO = "auto"
SKEW_SECONDS = 60.0
"""Clocks of two nodes may differ so much: a start that lies so far ahead is now."""
LONGEST_SECONDS = 10 * 366 * 86400.0


def job_end(facts: Facts, time_limit: str | None, began: float, now: float) -> tuple[float | None, list[str]]:
    """(when the job ends, seconds since 1970, or None; what was wrong with what the environment says, in sentences).

    `began`: when the launcher or the attempt began. ValueError for a duration in none of sbatch's forms.
    """
    if time_limit is None:
        return None, []
    warnings: list[str] = []
    slurm_end = _job_end_time(facts.job_end_time, now, warnings)
    if time_limit == AUTO:
        return slurm_end, warnings
    seconds = duration_seconds(time_limit)
    if seconds is None:
        raise ValueError(f"cluster.time_limit: {time_limit!r} is no duration; allowed: auto, {FORMS}, or null")
    end = _job_start_time(facts.job_start_time, began, now, warnings) + seconds
    if slurm_end is not None and slurm_end < end:
        warnings.append(
            f"cluster.time_limit: {time_limit} ends {end - slurm_end:.0f} s after the job itself; the job's end counts"
        )
        end = slurm_end
    return end, warnings


def _job_end_time(text: str | None, now: float, warnings: list[str]) -> float | None:
    if text is None:
        return None
    end = _epoch(text)
    if end is None or not now < end < now + LONGEST_SECONDS:
        why = "is no time since 1970" if end is None else "has passed" if end <= now else "is years ahead"
        warnings.append(f"SLURM_JOB_END_TIME: {text!r} {why}; the end of the job is not known")
        return None
    return end


def _job_start_time(text: str | None, began: float, now: float, warnings: list[str]) -> float:
    if text is None:
        return began
    start = _epoch(text)
    if start is None or not now - LONGEST_SECONDS < start <= now + SKEW_SECONDS:
        why = "is no time since 1970" if start is None else "is in the future" if start > now else "is years ago"
        warnings.append(
            f"SLURM_JOB_START_TIME: {text!r} {why}; cluster.time_limit counts from the start of this attempt"
        )
        return began
    return min(start, now)


def _epoch(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and int(text) > 0 else None
