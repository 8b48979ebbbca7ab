"""Options of the commands that run in what another launcher has started: `p3 exec`, `p3 doctor`."""

from __future__ import annotations

import argparse

from p3.launch.launchers.adapters import ADAPTERS


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        choices=[adapter.name for adapter in ADAPTERS],
        help="the launcher that places the workers, if the variables of several are set",
    )
    parser.add_argument(
        "--meeting-dir",
        metavar="DIR",
        default="~/.p3",
        help="where the processes of a job meet: a folder of yours that all hosts share (default ~/.p3)",
    )
