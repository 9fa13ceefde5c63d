"""What `pekoe doctor` said of a machine or a cluster, for tests that look into it."""

from __future__ import annotations

import json


class Examined:
    """A report in JSON, whose exit code is the process'."""

    def __init__(self, text: str, code: int) -> None:
        assert text.startswith("{"), text
        said = json.loads(text)
        assert said["exit_code"] == code
        self.code = code
        self.findings: list[dict[str, str]] = said["findings"]

    def find(self, area: str, text: str) -> dict[str, str]:
        """The one finding of an area that holds the text."""
        matching = [one for one in self.findings if one["area"] == area and text in one["text"]]
        assert len(matching) == 1, json.dumps(self.findings, indent=1)
        return matching[0]

    @property
    def problems(self) -> list[str]:
        return [one["text"] for one in self.findings if one["severity"] == "problem"]
