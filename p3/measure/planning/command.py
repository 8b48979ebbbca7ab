"""`p3 plan`: which servers should hold how much, and how large slices should be, for a model on such hosts and links.

    p3 plan --models vgg19 --size 0.03 --compute 4 --hosts 4 --rate 40mbit:40mbit:40mbit:20mbit --out strategy.json
    p3 plan --recorded trace --hosts 4 --rate 1gbit:1gbit:1gbit:100mbit --out strategy.json
    p3 run -n 4 -s 4 --hostfile hosts --strategy strategy.json python train.py

docs/planning.md says what the file may have, and how far the predictions have been held against the lab.
"""

from __future__ import annotations

import argparse
import json
from typing import List

from p3.errors import ConfigError
from p3.measure.arguments import number
from p3.measure.planning import BUDGET_S
from p3.measure.simulate import options as given
from p3.settings import Settings


def add_parser(commands) -> None:
    """Adds `plan` to the subparsers of `p3`."""
    parser = commands.add_parser(
        "plan",
        help="find out which servers should hold how much, for links that may differ",
        description="Looks for the strategy with the shortest iteration in the simulator, and writes it for `p3 run "
        "--strategy`. Without --allow-lossy training has the same mathematics, whatever it finds. Takes the options of "
        "`p3 simulate`.",
    )
    given.add_options(parser)
    parser.add_argument("--budget", type=number(0, 1e6), default=BUDGET_S, metavar="S",
                        help="seconds for the search (default %(default)g)")
    parser.add_argument("--price", type=number(0, 1e9), metavar="P", help="of a host for an hour: what 1000 steps cost")
    parser.add_argument("--allow-lossy", action="store_true",
                        help="compress gradients where that is faster; propose local steps, if that is too slow, too")
    parser.add_argument("--json", action="store_true", help="say it as one JSON object, for programs")
    parser.add_argument("--out", metavar="FILE", help="write the strategy to FILE")
    parser.add_argument("--judge", metavar="FILE", action="append",
                        help="search nothing: hold what `p3 bench verdict --out FILE` has measured against predictions")
    parser.set_defaults(handler=_plan)


def _plan(options: argparse.Namespace, _settings: Settings, _command: List[str]) -> int:
    from p3.measure.planning import lossy, report
    from p3.measure.planning.search import Search

    if options.judge:
        from p3.measure.planning import judge

        print(judge.text(options))
        return 0
    try:
        asked = list(given.settings(options))
        if len(asked) > 1:
            raise ConfigError(f"p3 plan is for one setting; {len(asked)} are given")
        if asked[0].scheme != "p3":
            raise ConfigError(f"p3 plan: scheme {asked[0].scheme!r} knows no strategies; leave out --scheme")
        if options.out:
            open(options.out, "a", encoding="utf-8").close()  # or the search would be for nothing
        search = Search(asked[0])
        best = search.best(options.budget)
        found = lossy.lossy(asked[0], best) if options.allow_lossy else None
        strategy = best.strategy if found is None else found.of(best.strategy)
        said = {**report.told(asked[0], search, best, options.price), "strategy": json.loads(strategy.text())}
        said["lossy"] = None if found is None else found.told()
        if options.out:
            with open(options.out, "w", encoding="utf-8") as file:
                file.write(strategy.text())
        if options.json:
            print(json.dumps(said, indent=1))
            return 0
        for line in report.lines(asked[0], said):
            print(line)
        if found is not None:
            print()
            for line in lossy.lines(found):
                print(line)
        if options.out:
            print(f"\nwrote {options.out}")
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"p3 plan: {error}") from None
    except OSError as error:
        if error.filename is None:  # whoever reads what is printed has gone
            raise
        raise ConfigError(f"p3 plan: {error.filename}: {error.strerror}") from None
    return 0
