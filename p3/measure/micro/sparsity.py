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
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import numpy as np

from p3.measure.bench import jobs, machine
from p3.measure.lab.hosts import lab
from p3.measure.micro import sparsity_worker as worker

VARIANTS: Dict[str, Tuple[str, str]] = {  # name -> store, weights
    "p3_rows": ("p3_sync", "rows"),
    "p3_dense": ("p3_sync", "whole"),
    "dist_sync": ("dist_sync", "rows"),
}
TRIED_BATCHES = 4  # from which a vocabulary's alpha is told in advance


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
        sys.executable, "-m", "p3.measure.micro.sparsity_worker", store, weights, "--vocabulary", str(vocabulary),
        "--steps", str(options.steps), "--warmup", str(options.warmup),
    ]  # fmt: skip
    record = {
        "variant": name, "target_alpha": alpha, "vocabulary": vocabulary, "hosts": len(hosts),
        "rate_mbit": options.rate, "commit": machine.commit(), "error": None,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="p3-sparsity-") as folder, jobs.Job(
        jobs.STORES[store], hosts, command, root=hosts[0], port=port, folder=Path(folder),
        omp_threads=max(1, (os.cpu_count() or 1) // len(hosts)),
    ) as job:  # fmt: skip
        try:
            job.start()
            job.wait(options.timeout)
        except jobs.JobError as error:
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

    source = worker.batches(example.Text, 1, 0)
    tried = [next(source) for _ in range(TRIED_BATCHES)]

    def alpha_with(vocabulary: int) -> float:
        random = np.random.RandomState(1)
        found = []
        for words, following in tried:
            outputs = np.union1d(following % vocabulary, example.draw(random, vocabulary, worker.SAMPLES))
            found.append(worker.alpha_of_model(len(np.unique(words % vocabulary)), len(outputs), vocabulary))
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
    parser = argparse.ArgumentParser(
        prog="p3 bench sparsity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alphas", default="0.01,0.04,0.1,0.3,1", help="of the model (%(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, comma-separated (%(default)s)")
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=100.0, metavar="MBIT", help="of each link (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed, of a run (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a run (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="each run is appended there")
    options = parser.parse_args(arguments)
    options.alphas = [float(alpha) for alpha in options.alphas.split(",")]
    options.variants = options.variants.split(",")
    unknown = [name for name in options.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}; choose from {', '.join(VARIANTS)}")
    if not all(0 < alpha <= 1 for alpha in options.alphas):
        parser.error("an alpha is above 0 and at most 1")
    return options
