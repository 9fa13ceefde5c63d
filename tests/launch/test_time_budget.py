"""The end of the job: counted from its real start, by one clock; what cannot be used costs one warning."""

from __future__ import annotations

import pytest

from pekoe.launch.environment import Facts, read
from pekoe.launch.time_budget import job_end
from pekoe.pipeline.config.check import check
from pekoe.pipeline.config.durations import duration_seconds
from pekoe.pipeline.config.run import RunConfig
from pekoe.pipeline.config.schema import ConfigError

NOW = 1_700_000_000.0
BEGAN = NOW - 100


def facts(**variables: str) -> Facts:
    return read({f"SLURM_JOB_{name.upper()}_TIME": value for name, value in variables.items()}, host="here")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("40", 2400), ("01", 60), ("90:30", 5430), ("1:02:03", 3723), ("30:00:00", 108000), ("2-0", 172800),
        ("1-12", 129600), ("1-12:30", 131400), ("1-12:30:15", 131415), ("0-0:5", 300),
        ("", None), ("abc", None), ("0", None), ("1:2:3:4", None), ("-5", None), ("1.5", None), ("1-", None),
        ("1-2-3", None), ("10m", None), (" 5", None), ("5\n", None), ("٣", None),
        ("UNLIMITED", None), ("0-00:00", None),
    ],
)  # fmt: skip
def test_durations_are_those_of_sbatch(text: str, seconds: int | None) -> None:
    assert duration_seconds(text) == seconds


def test_a_limit_counts_from_the_real_start_of_the_job() -> None:
    """Half an hour of image pull, model load and compile has been used up already."""
    end, warnings = job_end(facts(start=f"{NOW - 1800:.0f}"), "40", BEGAN, NOW)
    assert end == NOW + 10 * 60
    assert warnings == []


@pytest.mark.parametrize("start", ["", "abc", f"{NOW + 1000:.0f}", "-5", "12.5", "1e9", "0", "17", "1" * 400])
def test_a_start_that_cannot_be_used_costs_one_warning(start: str) -> None:
    end, warnings = job_end(facts(start=start), "40", BEGAN, NOW)
    assert end == BEGAN + 2400
    assert len(warnings) == 1
    assert f"SLURM_JOB_START_TIME: {start!r}" in warnings[0]


def test_without_slurm_a_limit_counts_from_the_attempt() -> None:
    assert job_end(facts(), "1-00:00:00", BEGAN, NOW) == (BEGAN + 86400, [])


def test_a_start_a_few_seconds_ahead_is_another_clock() -> None:
    assert job_end(facts(start=f"{NOW + 5:.0f}"), "40", BEGAN, NOW) == (NOW + 2400, [])


def test_auto_is_what_slurm_says() -> None:
    end = f"{NOW + 600:.0f}"
    assert job_end(facts(end=end), "auto", BEGAN, NOW) == (NOW + 600, [])
    assert job_end(facts(), "auto", BEGAN, NOW) == (None, [])
    assert job_end(facts(end=end), None, BEGAN, NOW) == (None, [])


@pytest.mark.parametrize("end", ["", "abc", f"{NOW - 1:.0f}", f"{NOW + 1e10:.0f}", "Unknown"])
def test_an_end_that_cannot_be_used_costs_one_warning(end: str) -> None:
    found, warnings = job_end(facts(end=end), "auto", BEGAN, NOW)
    assert found is None
    assert len(warnings) == 1
    assert f"SLURM_JOB_END_TIME: {end!r}" in warnings[0]


def test_the_job_ends_when_slurm_says_so_whatever_the_limit() -> None:
    variables = {"start": f"{NOW - 1800:.0f}", "end": f"{NOW + 60:.0f}"}
    end, warnings = job_end(facts(**variables), "40", BEGAN, NOW)
    assert end == NOW + 60
    assert len(warnings) == 1
    assert job_end(facts(**variables), "30:30", BEGAN, NOW) == (NOW + 30, [])


@pytest.mark.parametrize("text", ["1:2:3:4", "soon", "", "0"])
def test_a_malformed_limit_is_an_error_before_anything_starts(text: str) -> None:
    config = RunConfig()
    config.cluster.time_limit = text
    with pytest.raises(ConfigError, match=r"cluster.time_limit: .* is no duration; allowed: auto, minutes, MM:SS"):
        check(config)
    with pytest.raises(ValueError, match=r"cluster.time_limit"):
        job_end(facts(), text, BEGAN, NOW)
