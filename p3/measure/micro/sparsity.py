"""How much does sparsity save? A language model's throughput against alpha, the share of the model that a step touches.

    sudo p3 bench sparsity                                  # 2 hosts at 100 Mbit/s
    sudo p3 bench sparsity --alphas 0.04 --repeats 5 --json sparsity.jsonl

After Parallax (EuroSys'19, table 6). The vocabulary is padded until a step touches alpha of the model's elements; the
text, the batch and the samples that words are scored against stay the same. Each host runs one worker and one server:
    p3_rows     p3_sync, words' vectors row_sparse: what was touched travels
    p3_dense    p3_sync, everything dense
    dist_sync   MXNet's default store, with the same row_sparse weights
Each run is a fresh job; stores take turns in an order that rotates. A step lasts from one loss that can be read to the
next; words/s are those of all workers over the slowest worker's median step, and the median over runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import numpy as np

from p3.measure import arguments as given
from p3.measure.jobs import machine
from p3.measure.jobs.job import Job, JobError
from p3.measure.jobs.stores import STORES
from p3.measure.lab.hosts import lab
from p3.measure.workers.lines import Lines
from p3.measure.workers.mxnet_store import import_mxnet

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

STREAMS = 32  # of one worker
SEGMENT = 64
SAMPLES = 1024
SIZE = 128  # of a word's vector, and of the recurrent layer
DENSE_ELEMENTS = 4 * SIZE * (2 * SIZE + 2)  # of the recurrent layer
BATCH = STREAMS * SEGMENT
VARIANTS: Dict[str, Tuple[str, str]] = {  # name -> store, weights
    "p3_rows": ("p3_sync", "rows"),
    "p3_dense": ("p3_sync", "whole"),
    "dist_sync": ("dist_sync", "rows"),
}
TRIED_BATCHES = 4  # from which a vocabulary's alpha is told in advance


def batches(text_of, workers: int, rank: int):
    """(words, the words after them), each time x streams, of one worker; without end."""
    streams = text_of(STREAMS * workers).streams[rank::workers]
    while True:
        for start in range(0, streams.shape[1] - SEGMENT, SEGMENT):
            piece = streams[:, start : start + SEGMENT + 1].T
            yield piece[:-1], piece[1:]


def alpha_of_model(touched_words: int, touched_outputs: int, vocabulary: int) -> float:
    """The share of the model's elements that a step of one worker touches (Parallax, section 2.2)."""
    touched = (touched_words + touched_outputs) * SIZE + DENSE_ELEMENTS
    return touched / (2 * vocabulary * SIZE + DENSE_ELEMENTS)


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    print(f"commit {machine.commit()}; {options.hosts} hosts, {options.rate:g} Mbit/s")
    records: List[dict] = []
    with lab(options.hosts, options.rate) as hosts:
        ports = iter(range(9100, 65536))
        for repeat in range(options.repeats):
            shift = repeat % len(options.variants)
            for alpha in options.alphas:
                vocabulary = vocabulary_of(alpha)
                for name in options.variants[shift:] + options.variants[:shift]:
                    record = run(name, alpha, vocabulary, hosts, next(ports), options)
                    records.append(record)
                    print(f"  {record}" if record["error"] else "  " + line(record), file=sys.stderr, flush=True)
                    if options.json:
                        with open(options.json, "a", encoding="utf-8") as file:
                            print(json.dumps(record), file=file)
    print(table(records, options.variants))
    return 1 if any(record["error"] for record in records) else 0


def run(name: str, alpha: float, vocabulary: int, hosts, port: int, options) -> dict:
    store, weights = VARIANTS[name]
    command = [
        sys.executable, "-m", "p3.measure.micro.sparsity", store, weights, "--vocabulary", str(vocabulary),
        "--steps", str(options.steps), "--warmup", str(options.warmup),
    ]  # fmt: skip
    record = {
        "variant": name, "target_alpha": alpha, "vocabulary": vocabulary, "hosts": len(hosts),
        "rate_mbit": options.rate, "commit": machine.commit(), "error": None,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="p3-sparsity-") as folder, Job(
        STORES[store], hosts, command, root=hosts[0], port=port, folder=Path(folder),
        omp_threads=machine.omp_threads(len(hosts)),
    ) as job:  # fmt: skip
        try:
            job.start()
            job.wait(options.timeout)
        except JobError as error:
            return dict(record, error=str(error))
        outputs = [job.lines(f"worker {number}") for number in range(job.num_workers)]
    results = [lines[-1] for lines in outputs]
    if any(result["result"] != "right" or result["workers"] != len(hosts) for result in results):
        return dict(record, error=f"wrong: {results}")
    steps = [
        max(same)
        for same in zip(*([one["seconds"] for one in lines if not one.get("warmup", True)] for lines in outputs))
    ]
    step_s = statistics.median(steps)
    return dict(
        record, alpha=results[0]["alpha"], bytes=results[0]["bytes"], steps_s=steps, step_s=step_s,
        words_per_s=results[0]["words"] * len(hosts) / step_s, keys=(results[0]["stats"] or {}).get("keys"),
    )  # fmt: skip


def vocabulary_of(alpha: float) -> int:
    """The least vocabulary of which a step touches no more than `alpha` of the model, by bisection."""
    import language_model as example

    source = batches(example.Text, 1, 0)
    tried = [next(source) for _ in range(TRIED_BATCHES)]

    def alpha_with(vocabulary: int) -> float:
        random = np.random.RandomState(1)
        found = []
        for words, following in tried:
            outputs = np.union1d(following % vocabulary, example.draw(random, vocabulary, SAMPLES))
            found.append(alpha_of_model(len(np.unique(words % vocabulary)), len(outputs), vocabulary))
        return statistics.mean(found)

    low, high = 1, 1 << 24
    while low < high:
        middle = (low + high) // 2
        if alpha_with(middle) > alpha:
            low = middle + 1
        else:
            high = middle
    return low if alpha < 1 else full_vocabulary(alpha_with)


def full_vocabulary(alpha_with) -> int:
    """The largest vocabulary of which every step touches all."""
    vocabulary = 1
    while alpha_with(vocabulary + 8) > 0.99:
        vocabulary += 8
    return vocabulary


def line(record: dict) -> str:
    return (
        f"{record['variant']:10} alpha {record['alpha']:.3f} of {record['bytes'] / 1e6:.0f} MB: "
        f"{record['step_s']:.3f} s, {record['words_per_s']:.0f} words/s"
    )


def table(records: List[dict], variants: List[str]) -> str:
    """Markdown."""
    head = ["alpha", "model, MB", *(f"{name}, words/s (min..max)" for name in variants)]
    if "p3_rows" in variants:
        head += [f"p3_rows over {name}" for name in variants if name != "p3_rows"]
    rows = []
    for alpha in dict.fromkeys(record["target_alpha"] for record in records):
        good = [record for record in records if record["target_alpha"] == alpha and not record["error"]]
        found = {name: [one["words_per_s"] for one in good if one["variant"] == name] for name in variants}
        row = [f"{good[0]['alpha']:.3f}", f"{good[0]['bytes'] / 1e6:.1f}"] if good else [f"{alpha:g}", "-"]
        row += [spread(found[name]) for name in variants]
        for name in variants:
            if "p3_rows" in variants and name != "p3_rows":
                row.append(ratio(found["p3_rows"], found[name]))
        rows.append(row)
    return "\n".join("| %s |" % " | ".join(cells) for cells in [head, ["---"] * len(head), *rows])


def spread(values: List[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}..{max(values):.0f})" if values else "failed"


def ratio(ours: List[float], others: List[float]) -> str:
    return f"{statistics.median(ours) / statistics.median(others):.2f}x" if ours and others else "-"


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = given.parser("sparsity", __doc__)
    parser.add_argument("--alphas", type=given.list_of(given.number(1e-9, 1)), default="0.01,0.04,0.1,0.3,1",
                        help="of the model (%(default)s)")  # fmt: skip
    parser.add_argument("--variants", type=given.names_among(tuple(VARIANTS)), default=",".join(VARIANTS),
                        help="which, comma-separated (%(default)s)")  # fmt: skip
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=100.0, metavar="MBIT", help="of each link (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed, of a run (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a run (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="each run is appended there")
    return parser.parse_args(arguments)


def work(options) -> None:
    """One worker: trains examples/language_model.py's network with a vocabulary padded to a size. A step lasts from one
    loss that can be read to the next. Words beyond the vocabulary are folded into it."""
    mx = import_mxnet(options.store)
    from mxnet import autograd, gluon

    import language_model as example

    lines = Lines(sys.stdout, "real", options.store)
    store = mx.kv.create(options.store)
    mx.random.seed(1)
    random = np.random.RandomState(1 + store.rank)
    net = example.LanguageModel(options.vocabulary, SIZE, SIZE, sparse=options.weights == "rows")
    net.initialize(mx.init.Xavier())
    # MXNet refuses another batch size than the first step's, which with row_sparse weights it takes to be 1.
    trainer = gluon.Trainer(
        net.collect_params(), "adam", {"learning_rate": 0.002, "rescale_grad": 1.0}, kvstore=store,
        update_on_kvstore=True,
    )  # fmt: skip
    scale = 1.0 / (BATCH * store.num_workers)
    losses, alphas, start = [], [], None
    state = net.lstm.begin_state(STREAMS)
    source = batches(example.Text, store.num_workers, store.rank)
    for number in range(-1, options.warmup + options.steps):
        words, following = (one % options.vocabulary for one in next(source))
        state = [part.detach() for part in state]
        with autograd.record():
            others = example.draw(random, options.vocabulary, SAMPLES)
            each, state = example.sampled_loss(net, words, following, others, state, options.vocabulary)
            loss = each.sum() * scale
        loss.backward()
        trainer.step(1)
        losses.append(each.mean().asscalar())
        end = time.monotonic()
        if start is not None:
            lines.iteration(number, number < options.warmup, start, end, loss=float(losses[-1]))
        start = end
        outputs = np.union1d(following, others)
        alphas.append(alpha_of_model(len(np.unique(words)), len(outputs), options.vocabulary))
    mx.nd.waitall()
    fallen = bool(losses[-1] < losses[0])
    elements = 2 * options.vocabulary * SIZE + DENSE_ELEMENTS
    lines.result(
        fallen, losses=[float(losses[0]), float(losses[-1])],
        alpha=float(np.mean(alphas)), bytes=4 * elements, words=BATCH, workers=store.num_workers,
        stats=store.stats() if hasattr(store, "stats") else None,
    )  # fmt: skip


def _worker() -> None:
    parser = argparse.ArgumentParser(description="Trains a language model on a KVStore.")
    parser.add_argument("store", help="what mx.kv.create is given")
    parser.add_argument("weights", choices=("rows", "whole"), help="of words: row_sparse, or all dense")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--steps", type=int, default=5, help="that count (default 5)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default 2)")
    work(parser.parse_args())


if __name__ == "__main__":
    _worker()
