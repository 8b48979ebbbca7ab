"""Options of the commands that run in what another launcher has started: `p3 exec`, `p3 doctor`."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        choices=("slurm", "openmpi", "mpich", "torchrun", "kubernetes"),
        help="whose variables say which process this is, if those of several are set",
    )
    parser.add_argument(
        "--meeting-dir",
        metavar="DIR",
        default="~/.p3",
        help="where the processes of a job find each other: a folder of yours that all hosts share (default ~/.p3)",
    )
