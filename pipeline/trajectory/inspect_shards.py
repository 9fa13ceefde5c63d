"""`pekoe shards ls|show|verify RUN`: looks into the shards of a run. HDF5 is imported only when the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

SHOWN_ROWS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `pekoe shards`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser(
        "ls", help="list shards and archives: groups, sequences, tokens, versions, mean reward"
    )
    verify = actions.add_parser(
        "verify", help="read and check every byte, say what becomes of damaged files; exit code 1 when there is one"
    )
    show = actions.add_parser("show", help="print episodes as text, with rewards and weight versions")
    for one in (listing, verify, show):
        one.add_argument("run", type=Path, help="run directory")
    for one in (listing, verify):
        one.add_argument("shards", nargs="*", help="shards, as ls prints them (default: all)")
    show.add_argument("shard", nargs="?", help="shard (default: the newest)")
    show.add_argument("--group", type=int, help="only the rows of this admission number")
    show.add_argument("--row", type=int, help="only this row")
    show.add_argument(
        "--limit", type=int, default=SHOWN_ROWS, help=f"most rows to print (default {SHOWN_ROWS}; 0 = all)"
    )
    show.add_argument("--ids", action="store_true", help="print token ids even when a tokenizer is there")


def main(args: argparse.Namespace) -> int:
    """Runs the action; gives the exit code (1 = a shard is damaged, 2 = wrong use)."""
    from pekoe.pipeline.trajectory.shard_views import run_action

    return run_action(args)
