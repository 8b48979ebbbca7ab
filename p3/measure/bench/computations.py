"""What the workers of an experiment compute: the program that each store's run, and what it tells besides times.

What is right is told by the workers themselves: they know what every weight must be (the replay), or say what they have
(trainings), and then all must have the same.
"""

from __future__ import annotations

import sys
from typing import Callable, Dict, List, NamedTuple

from p3.errors import ConfigError
from p3.measure.bench import measured
from p3.measure.bench.configuration import Configuration, Course
from p3.measure.jobs.stores import Store
from p3.measure.replay import models
from p3.measure.trainings import mxnet_convnet, resnets


class Computation(NamedTuple):
    name: str  # in records: emulated or real
    command: Callable[[Store, Configuration, Course, int], List[str]]  # of a worker, in that repeat
    model_bytes: Callable[[Configuration], int]
    tells: Callable[[measured.Workers, Store], Dict]  # fields of the record, besides those of times
    steps: Callable[[Configuration], int] = lambda _: 1  # of an iteration of the course


def _program(module: str, store: Store, *options) -> List[str]:
    return [sys.executable, "-m", module, "--store", store.kvstore, *map(str, options)]


def _common(configuration: Configuration, course: Course) -> List[str]:
    return ["--size", repr(configuration.size), "--iterations", str(course.iterations), "--warmup", str(course.warmup)]


def _compression(store: Store) -> List[str]:
    """Of MXNet's; those of torch have it in their names."""
    if store.compression is None or store.is_torch:
        return []
    kind, _, ratio = store.compression.up.partition(":")
    return ["--dgc", ratio] if ratio else ["--compression", kind]


def _clip(configuration: Configuration) -> List[str]:
    return [] if configuration.clip is None else ["--clip", repr(configuration.clip)]


def _curve(workers: measured.Workers, store: Store) -> Dict:
    return measured.curve(workers, store.may_be_apart)


def _lesson_tells(workers: measured.Workers, store: Store) -> Dict:
    return {**_curve(workers, store), **measured.heldout(workers)}


def _local_lesson_tells(workers: measured.Workers, store: Store) -> Dict:
    """Each host has a worker and a server: it sends to the others' servers, and to the others' workers."""
    share = store.compression.share if store.compression else 1.0
    remote = 1 - 1 / len(workers)
    card_bytes = round(2 * workers[0][0]["bytes"] * share * remote / store.every) or None
    return {**_lesson_tells(workers, store), "card_bytes": card_bytes}


def _replay(store: Store, configuration: Configuration, course: Course, _repeat: int) -> List[str]:
    return _program(
        "p3.replay", store, *_common(configuration, course), "--model", configuration.model,
        "--compute", repr(configuration.compute_s), "--jitter", repr(course.jitter), "--optimizer", course.optimizer,
        "--release", configuration.release, *_clip(configuration), *_compression(store),
        *([] if store.route is None else ["--factors", store.route, "--batch", configuration.batch]),
    )  # fmt: skip


def _convnet(store: Store, configuration: Configuration, course: Course, _repeat: int) -> List[str]:
    return _program(
        "p3.measure.trainings." + ("torch_convnet" if store.is_torch else "mxnet_convnet"), store,
        *_common(configuration, course), *_clip(configuration), "--pause", repr(course.pause_s),
        "--learning-rate", repr(course.learning_rate), "--momentum", repr(course.momentum),
    )  # fmt: skip


def _lesson(store: Store, configuration: Configuration, course: Course, _repeat: int) -> List[str]:
    common = [*_common(configuration, course), *_clip(configuration), "--device", configuration.device]
    if configuration.batch_size is not None:
        common += ["--batch-size", str(configuration.batch_size)]
    return _program("p3.measure.trainings.torch_lesson", store, *common, "--model", configuration.model)


def _seeded_lesson(store: Store, configuration: Configuration, course: Course, repeat: int) -> List[str]:
    return [*_lesson(store, configuration, course, repeat), "--seed", str(repeat)]


def _lesson_bytes(configuration: Configuration) -> int:
    try:
        from p3.measure.trainings import lessons
    except ImportError as error:
        raise ConfigError(
            f"p3 bench {configuration.experiment} needs PyTorch ({error}): pip install 'p3-training[torch]'"
        ) from None
    return lessons.model_bytes(configuration.model, configuration.size)


def _resnet(store: Store, configuration: Configuration, course: Course, repeat: int) -> List[str]:
    return _program(
        "p3.measure.trainings.mxnet_resnet", store, *_compression(store),
        "--depth", resnets.depth_of(configuration.model), "--epochs", course.iterations, "--seed", repeat,
    )  # fmt: skip


REPLAY = Computation(
    "emulated", _replay, lambda one: models.load(one.model, one.size).bytes, lambda workers, store: {}
)  # fmt: skip
CONVNET = Computation("real", _convnet, lambda one: mxnet_convnet.model_bytes(one.size), _curve)
LESSON = Computation("real", _lesson, _lesson_bytes, _lesson_tells)
SEEDED_LESSON = LESSON._replace(command=_seeded_lesson)
LOCAL_LESSON = SEEDED_LESSON._replace(tells=_local_lesson_tells)
RESNET = Computation(
    "real", _resnet, lambda one: resnets.model_bytes(resnets.depth_of(one.model)),
    lambda workers, store: measured.accuracies(workers), lambda one: resnets.steps_of_an_epoch(one.workers),
)  # fmt: skip
