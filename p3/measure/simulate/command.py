"""`p3 simulate`: predicts iterations without hosts, for one setting or for many.

    p3 simulate --models vgg19 --size 0.03 --compute 4 --hosts 2,4,8 --rate 40mbit
    p3 simulate --hosts 8 --rate 40mbit --trace eight.json
    p3 simulate --models resnet50 --timeline timeline
    p3 simulate --validate results.jsonl

docs/simulator.md describes the model, what it leaves out, and how it has been held against the lab.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import List

from p3.errors import ConfigError
from p3.measure.simulate import options as given
from p3.settings import Settings


def add_parser(commands) -> None:
    """Adds `simulate` to the subparsers of `p3`."""
    parser = commands.add_parser(
        "simulate",
        help="predict the time of an iteration on hosts that you do not have",
        description="Simulates training the shapes of a model, with P3 or DDP, over links of a chosen rate. Every "
        "combination of what has several values is simulated.",
    )
    given.add_options(parser)
    parser.add_argument("--trace", metavar="FILE", help="of the last iteration, for https://ui.perfetto.dev")
    parser.add_argument("--out", metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--validate", nargs="+", metavar="FILE",
                        help="simulate what `p3 bench --out` has measured, and show both")
    parser.add_argument("--plot", metavar="FILE.svg", help="the predictions against the number of hosts")
    parser.add_argument("--timeline", metavar="NAME",
                        help="an iteration of the usual way above one of P3: NAME-light.svg and NAME-dark.svg")
    parser.add_argument("--measured", nargs="+", default=[], metavar="FILE",
                        help="points in --plot that `p3 bench --out` has measured")
    parser.set_defaults(handler=_simulate)


def _simulate(options: argparse.Namespace, _settings: Settings, _command: List[str]) -> int:
    try:
        if options.validate:
            return _validate(options)
        return _predict(options)
    except ValueError as error:
        raise ConfigError(f"p3 simulate: {error}") from None
    except OSError as error:
        if error.filename is None:  # whoever reads what is printed has gone
            raise
        raise ConfigError(f"p3 simulate: {error.filename}: {error.strerror}") from None


def _predict(options: argparse.Namespace) -> int:
    from p3.measure.simulate import chrome, report
    from p3.measure.simulate.predict import predict

    asked = list(given.settings(options))
    for name in ("trace", "timeline"):
        if getattr(options, name) and len(asked) > 1:
            raise ConfigError(f"p3 simulate --{name} takes one setting; {len(asked)} are given")
    if options.trace:
        asked = [dataclasses.replace(asked[0], traced_iterations=1)]
    predictions = []
    for setting in asked:
        predictions.append(predict(setting))
        if options.out:
            with open(options.out, "a", encoding="utf-8") as file:
                print(json.dumps(report.record(setting, predictions[-1])), file=file)
    lines = report.table(asked, predictions) if len(asked) > 1 else report.full(asked[0], predictions[0])
    for line in lines:
        print(line)
    if options.trace:
        count = chrome.write(asked[0], predictions[0], options.trace)
        print(f"\nwrote {count} events to {options.trace}")
    if options.plot:
        _plot(options, asked, predictions)
    if options.timeline:
        _draw_timeline(asked[0], options.timeline)
    return 0


def _plot(options: argparse.Namespace, asked, predictions) -> None:
    try:
        from p3.measure.simulate import plot
    except ImportError as error:
        raise _no_matplotlib("--plot", error) from None
    plot.save(asked, predictions, options.measured, options.plot)
    print(f"\nwrote {options.plot}")


def _draw_timeline(setting, prefix: str) -> None:
    try:
        from p3.measure.simulate import plot_timeline
    except ImportError as error:
        raise _no_matplotlib("--timeline", error) from None
    written, drawn = plot_timeline.save(setting, prefix)
    print()
    for one in drawn:
        title = plot_timeline.TITLES[one.scheme]
        print(f"{title}: {one.seconds:.3f} s, of which the forward pass waits {one.waited_s:.3f} s")
    print(f"wrote {' and '.join(written)}")


def _no_matplotlib(option: str, error: ImportError) -> ConfigError:
    return ConfigError(f"p3 simulate {option} needs matplotlib ({error}): pip install matplotlib")


def _validate(options: argparse.Namespace) -> int:
    from p3.measure.simulate import validate

    for line in validate.lines(options):
        print(line)
    return 0
