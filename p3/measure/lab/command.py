"""`p3 lab`: sets up hosts on this machine, runs commands on them, shows them and takes them down.

    p3 lab up --nodes 4 --rate 100mbit --delay 50ms --loss 0.1%
    p3 lab exec 0 -- ip address
    p3 lab status
    p3 lab down
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
from dataclasses import asdict
from typing import Dict, Iterator, List, Optional, Sequence

from p3.errors import ConfigError
from p3.measure.arguments import number
from p3.measure.lab.shaping import CONGESTION, QUEUE_MS, SHAPERS, Shaping
from p3.settings import Settings

DEFAULT_NAME = "lab"
CHECK_S = 0.3  # of each transfer
ROUND_TRIPS = 10  # besides: until a connection goes as fast as it can
TOLERANCE = 0.15

SHAPER_HELP = (
    "what keeps the rate: a token bucket, tbf or htb, whose bursts are faster; or smooth, without bursts (default: "
    "tbf, or smooth with a delay or a loss)"
)

_MBIT = {"bit": 1e-6, "kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def add_parser(commands) -> None:
    """Adds `lab` to the subparsers of `p3`."""
    lab = commands.add_parser(
        "lab",
        help="make hosts on this machine, joined by a slow network, to try jobs on",
        description="Hosts made of namespaces, each with a link of a chosen rate and delay. Needs root.",
    )
    actions = lab.add_subparsers(title="actions", metavar="ACTION")
    actions.required = True

    up = actions.add_parser("up", help="set up a lab, and check its rates by a short transfer on each link")
    up.add_argument("--nodes", type=number(1, 200, int), metavar="N",
                    help="number of hosts (default 2, or as many as rates)")  # fmt: skip
    up.add_argument("--rate", type=rates, default=[None], metavar="R[,R...]",
                    help="of each host's link, each way: one for all or one for each, as 800mbit (default: no limit)")
    up.add_argument("--delay", type=delay, default=0.0, metavar="D", help="one way between hosts, as 50ms (none)")
    up.add_argument("--loss", type=share, default=0.0, metavar="P", help="of packets between hosts, as 0.1%% (none)")
    up.add_argument("--seed", type=number(0, 1 << 32, int), default=0, metavar="N",
                    help="other packets are lost with each (default %(default)s)")
    up.add_argument("--queue", type=delay, default=QUEUE_MS, metavar="D",
                    help="in front of each slow link, besides the burst, at its rate (default %gms)" % QUEUE_MS)
    up.add_argument("--shaper", choices=SHAPERS, help=SHAPER_HELP)
    up.add_argument("--beyond", action="store_true", help="uplinks are slow behind the hosts' own interfaces")
    up.add_argument("--congestion", choices=CONGESTION, default=CONGESTION[0],
                    help="TCP's congestion control on the hosts (default: the %(default)s's)")
    up.set_defaults(handler=_up)

    execute = actions.add_parser("exec", help="run a command on a host")
    execute.add_argument("node", type=number(0, 200, int), metavar="NODE", help="number of the host, from 0")
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    execute.set_defaults(handler=_exec)

    status = actions.add_parser("status", help="show all labs of this machine, and what runs on their hosts")
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(handler=_status)

    down = actions.add_parser("down", help="end what runs on the hosts, and remove the lab")
    down.set_defaults(handler=_down)

    for action in (up, execute, down):
        action.add_argument("--name", default=DEFAULT_NAME, help="of the lab (default %(default)s)")


def _up(options, _settings: Settings, _command: List[str]) -> int:
    from p3.measure.lab import hosts as lab

    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # to clean up as after Ctrl-C
    rates = options.rate
    count = options.nodes or (len(rates) if len(rates) > 1 else 2)
    with told():
        shaping = Shaping(options.shaper, options.queue, options.beyond, options.congestion)
        made = lab.up(options.name, count, rates if len(rates) > 1 else rates[0], options.delay, shaping, options.loss,
                      options.seed)
        try:
            print("lab %s is up:" % options.name)
            for host in made:
                print("  %s  %s  %s" % (host.name, host.address, _rate_text(host.rate_mbit)))
            _check_rates(made, options.delay, is_lossy=options.loss > 0)
        except BaseException:  # Ctrl-C too: half a command is none
            lab.down(options.name)
            raise
    return 0


def _check_rates(hosts: Sequence, delay_ms: float, is_lossy: bool) -> None:
    """From each host to the next, round the ring, so that every link is tried up and down. One connection, which may
    find no more of a link that is long or loses: then nothing is wrong with it."""
    from p3.measure.lab.transfer import measure

    if len(hosts) < 2:
        return
    print("a short transfer from each host to the next:")
    for source, sink in zip(hosts, [*hosts[1:], hosts[0]]):
        asked = min((host.rate_mbit for host in (source, sink) if host.rate_mbit is not None), default=None)
        try:
            got = measure(source, sink, CHECK_S + ROUND_TRIPS * 2 * delay_ms / 1e3)
        except OSError as error:
            raise ConfigError(str(error)) from None
        print("  %s to %s: %s of %s" % (source.name, sink.name, _rate_text(got), _rate_text(asked)))
        if asked is not None and abs(got / asked - 1) > TOLERANCE and not delay_ms and not is_lossy:
            print(
                "p3: warning: %s to %s is %+.0f%% off its rate: is the machine busy, or too slow for it?"
                % (source.name, sink.name, 100 * (got / asked - 1)),
                file=sys.stderr,
            )


def _exec(options, _settings: Settings, command: List[str]) -> int:
    from p3.measure.lab import hosts as lab

    if not command:
        raise ConfigError("p3 lab exec needs the command to run, for example: p3 lab exec 0 -- ip address")
    if command[0].startswith("-"):
        raise ConfigError("p3 lab exec takes its options before NODE; %r stands where the command begins" % command[0])
    with told():
        hosts = lab.attach(options.name)
        if options.node >= len(hosts):
            raise lab.LabError("lab %s has no host %d, only 0 to %d" % (options.name, options.node, len(hosts) - 1))
        argv = hosts[options.node].command(*command)
    os.execvp(argv[0], argv)


def _status(options, _settings: Settings, _command: List[str]) -> int:
    from p3.measure.lab import hosts as lab

    with told():
        labs = lab.status()
    if options.json:
        print(json.dumps([asdict(one) for one in labs]))
        return 0
    for one in labs:
        print("%s: %s, hosts: %d%s" % (one.name, one.state, len(one.hosts), _links_text(one)))
        for host, pids in zip(one.hosts, one.processes):
            running = "processes " + " ".join(map(str, pids)) if pids else "idle"
            print("  %s  %s  %s  %s" % (host.name, host.address, _rate_text(host.rate_mbit), running))
            if one.carried:
                print("    " + _carried_text(one.carried[host.node]))
    if not labs:
        print("no lab is up")
    return 0


def _down(options, _settings: Settings, _command: List[str]) -> int:
    from p3.measure.lab import hosts as lab

    with told():
        lab.down(options.name)
    return 0


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turns what is wrong with a lab into the error that `p3` prints."""
    from p3.measure.lab.hosts import LabError

    try:
        yield
    except (LabError, ValueError) as error:
        raise ConfigError(str(error)) from None


def rates(text: str) -> List[Optional[float]]:
    return [_rate(part) for part in text.split(",")]


def _rate(text: str) -> float:
    """In Mbit/s. Units that mean bytes to tc and bits to most people are refused."""
    if re.fullmatch(r"[\d.]+[kmg]?bps", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(
            "%r: tc reads `bps` as bytes, most people as bits; write bit, kbit, mbit or gbit" % text
        )
    return _quantity(text, _MBIT, "a rate such as 800mbit or 1.5gbit (units: bit, kbit, mbit, gbit)")


def share(text: str) -> float:
    """Of percent, from 0 to 1."""
    return _quantity(text, {"%": 0.01}, "a share in percent such as 0.5%")


def delay(text: str) -> float:
    return _quantity(text, _MS, "a delay such as 0.1ms (units: us, ms, s)")


def _quantity(text: str, units, wanted: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([a-z%]+)", text.lower())
    if found is None or found.group(2) not in units:
        raise argparse.ArgumentTypeError("%r is not %s" % (text, wanted))
    return float(found.group(1)) * units[found.group(2)]


def _rate_text(mbit: Optional[float]) -> str:
    return "no limit" if mbit is None else "%.4g Mbit/s" % mbit


def _links_text(one) -> str:
    delay = ", delay %g ms" % one.delay_ms if one.delay_ms else ""
    return delay + (", loss %g%%" % (100 * one.loss) if one.loss else "")


def _carried_text(carried: Dict) -> str:
    ways = ["%s: %%(packets)d packets, %%(lost)d of them lost, %%(dropped)d dropped" % way % carried[way]
            for way in ("up", "down")]  # fmt: skip
    return "; ".join([*ways, "at most %.2g ms late" % (1e3 * carried["late_s"])])
