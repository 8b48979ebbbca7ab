"""Options of the commands that run in what another launcher has started: `p3 exec`, `p3 doctor`."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        choices=("slurm", "openmpi", "mpich", "torchrun", "kubernetes"),
        help="the launcher that places the workers, if the variables of several are set",
    )
    parser.add_argument(
        "--meeting-dir",
        metavar="DIR",
        default="~/.p3",
        help="where the processes of a job meet: a folder of yours that all hosts share (default ~/.p3)",
    )
