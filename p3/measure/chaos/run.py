"""One run: a job under `p3 run`, a fault at its moment, and the record of what came of it.

The run is judged from outside, as its user sees it: by what `p3 run` prints, when, and by what is left. With root each
run has a lab of its own, whose processes, sockets and shared memory are nobody else's; without, the last two may be,
and are not looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence

from p3.measure.jobs.job import LocalHost
from p3.measure.chaos import lab_ssh
from p3.measure.chaos.lab_ssh import LAB, host_of
from p3.measure.chaos.matrix import GOES_ON, GROWS, INHERITS, NUMPY, REGAINS, REJOINS, SERVERS, Cell
from p3.measure.chaos.strike import environment, marked
from p3.measure.lab import hosts

DEADLINE_S, MXNET_DEADLINE_S = 100.0, 300.0  # a run that is not over by then hangs
RENDEZVOUS_S, MXNET_RENDEZVOUS_S = 10.0, 60.0  # MXNet's import takes many seconds on a busy machine
# Mbit/s of the links, if each process has a host of its own: so that rounds take long enough to be hit.
LINK_MBIT = 400.0
MACHINES = (1, 2)  # of the lab, each with a worker and a server, if it is machines that are lost
# Of processes that were just killed; the kernel takes a moment.
VANISH_S = 10.0

GOOD = ("raised", "ended", "done", "came back", "departed", "returned", "rejoined", "grew", "inherited",
        "regained", "outlived")  # fmt: skip

_ERROR = re.compile(r"(?:(?:P3|Rendezvous|Authentication|Timeout|Runtime|Config)Error: |^p3: )(.*)")
_ENDED = re.compile(r"^INFO p3.run: (\w+(?: \d+)?) ended with (.*)$")
_SOURCE = re.compile(r"^\[(\w+(?: \d+)?)\] (.*)$")


class Line(NamedTuple):
    at: float
    text: str


def run(cell: Cell, seed: int, settings: Optional[Dict[str, str]] = None) -> dict:
    """Never raises for what the job does wrong."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="p3-chaos-") as name, _site(cell) as site:
        folder = Path(name)
        (folder / "tmp").mkdir()
        before = _sockets_and_files(site[0])
        env = _environment(cell, site, mark, folder, settings)
        deadline_s = DEADLINE_S if cell.training == NUMPY else MXNET_DEADLINE_S
        code, said, ended = _watch(_command(cell, site, folder, seed), env, deadline_s)
        at_end = _journals(cell, folder)
        left = _left_over(mark, site[0], before, folder)
    return _record(cell, seed, code, said, ended, at_end, left)


@contextlib.contextmanager
def _site(cell: Cell) -> Iterator[Sequence]:
    """Where the job runs: the first is the launcher's and the scheduler's host."""
    if cell.is_cut:
        with hosts.lab(1 + len(MACHINES) if cell.loses_machine else len(cell.processes), LINK_MBIT) as made:
            yield made
    elif hosts.why_unavailable() is None:
        with hosts.lab(1) as made:
            yield made
    else:
        yield [LocalHost("127.0.0.1")]


def _command(cell: Cell, site: Sequence, folder: Path, seed: int) -> List[str]:
    launcher = ["-n", str(cell.workers), "-s", str(SERVERS)]
    job = ["--folder", str(folder), "--role", cell.victim.role, "--rank", str(cell.victim.rank), "--fault", cell.fault,
           "--moment", cell.moment, "--training", cell.training, "--seed", str(seed),
           "--striker", str(cell.striker), "--by", cell.by]  # fmt: skip
    if cell.has_snapshots:
        launcher += ["--snapshot-dir", str(folder / "snapshots"), "--snapshot-every",
                     str(cell.course.snapshot_every)]  # fmt: skip
    if cell.comes_back:
        launcher += ["--restarts", "2" if cell.fault == "back" else "1"]
    if cell.departs:
        launcher += ["--on-worker-loss", "continue", *(["--rejoin"] if cell.rejoins else [])]
    if cell.grows:
        launcher += ["--max-workers", str(cell.workers + 1)]
    if cell.outlives_servers:
        launcher += ["--on-server-loss", "continue", *(["--rejoin"] if cell.regains else [])]
    if cell.is_cut:
        machines, struck = [LAB], host_of(cell.victim)
        if cell.loses_machine:
            machines, struck = [f"{site[node].address} slots=1" for node in MACHINES], MACHINES[cell.victim.rank]
            launcher += ["--min-workers", "1"]
        (folder / "hosts").write_text("\n".join(machines) + "\n")
        launcher += ["--hostfile", str(folder / "hosts")]
        job += ["--lab", str(lab_ssh.folder_of(site[0])), "--host", str(struck)]
    python = [sys.executable, "-m"]
    return site[0].command(*python, "p3", "run", *launcher, *python, "p3.measure.chaos.job", *job)


def _environment(
    cell: Cell, site: Sequence, mark: str, folder: Path, settings: Optional[Dict[str, str]]
) -> Dict[str, str]:
    env = environment(mark)
    env.update({"TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    rendezvous_s = RENDEZVOUS_S if cell.training == NUMPY else MXNET_RENDEZVOUS_S
    env.update(P3_RENDEZVOUS_TIMEOUT_S=repr(rendezvous_s), P3_LOG="info")  # so p3 run tells how each process ended
    env["P3_WATCH_S"] = "0"  # and nothing else
    if len(site) > 1:
        env.update(lab_ssh.environment(site[0]))
    env.update(settings or {})
    return env


def _watch(command: Sequence[str], env: Dict[str, str], deadline_s: float):
    """(exit code, or None if it had to be killed; what it said; when it ended)"""
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    said: List[Line] = []

    def read() -> None:
        for text in process.stdout:
            said.append(Line(time.monotonic(), text[:-1]))

    reader = threading.Thread(target=read)
    reader.start()
    code: Optional[int] = None
    try:
        code = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        ended = time.monotonic()
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(VANISH_S)  # a process that is left may hold the pipe
    return code, list(said), ended


def _journals(cell: Cell, folder: Path) -> Dict[int, List[dict]]:
    return {
        rank: [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        for rank in range(cell.workers + cell.grows)
        for path in [folder / f"worker-{rank}.jsonl"]
        if path.exists()
    }


def _sockets_and_files(host) -> set:
    """Names of P3's abstract sockets, and all of shared memory, on a host of a lab."""
    if isinstance(host, LocalHost):  # others' jobs come and go here; the job's own processes and files are counted
        return set()
    command = host.command("sh", "-c", "cat /proc/net/unix; echo ---; ls -A /dev/shm")
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    sockets, _, files = shown.partition("---\n")
    return {name for name in sockets.split() if name.startswith("@p3-")} | set(files.splitlines())


def _left_over(mark: str, host, before: set, folder: Path) -> Dict[str, int]:
    """What has outlived `p3 run`, counted and then ended."""
    deadline = time.monotonic() + VANISH_S
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    processes = marked(mark)
    left = {
        "processes": len(processes),
        "sockets and shared memory": len(_sockets_and_files(host) - before),
        "temporary files": sum(len(files) for _, _, files in os.walk(folder / "tmp")),
    }
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _record(cell: Cell, seed: int, code, said, ended, journals, left) -> dict:
    entries = [dict(entry, worker=rank) for rank, journal in journals.items() for entry in journal]
    blow = next((entry for entry in entries if entry["kind"] == "strike"), None)
    after = next((entry for entry in entries if entry["kind"] == "after"), None)
    rounds = [entry for entry in entries if entry["kind"] in ("begun", "round")]
    errors = _errors(cell, said)
    done = {f"worker {rank}" for rank, journal in journals.items() if journal and journal[-1]["kind"] == "end"}
    survivors = [str(process) for process in cell.processes if process != cell.victim or _speaks(cell)]
    endings = dict(found.groups() for found in (_ENDED.match(line.text) for line in said) if found)
    in_order = done | {name for name, how in endings.items() if how == "exit code 0"}
    mute = [name for name in survivors if name not in errors and name not in in_order]
    own = [line.text[len("p3 run: "):] for line in said if line.text.startswith("p3 run: ")]
    record = {
        "role": cell.victim.role, "rank": cell.victim.rank, "fault": cell.fault, "moment": cell.moment, "seed": seed,
        "hit": blow and {key: blow[key] for key in ("round", "sent", "landed", "slices", "complete") if key in blow},
        "hit_after": after and {key: after[key] for key in ("sent", "landed")},
        "code": code,
        "training": cell.training, "blow": cell.blow,
        "weights": "none" if not rounds else "right" if _are_right(rounds) else "wrong",
        "begun": max((entry["round"] for entry in entries if entry["kind"] == "begun"), default=0),
        "rounds": max((entry["round"] for entry in rounds), default=0),
        "error_s": None, "end_s": None,
        "mute": mute,
        "endings": endings,
        "names_victim": sum(_names(cell, line.text) for line in errors.values()),
        "names_round": sum("round" in line.text for line in errors.values()),
        "errors": {name: line.text for name, line in errors.items()},
        "p3_run": own,
        "left": left,
    }  # fmt: skip
    if blow is not None:
        record["end_s"] = round(ended - blow["at"], 3)
        record["error_s"] = max((round(line.at - blow["at"], 3) for line in errors.values()), default=None)
        record["on_s"] = _gone_on_s(cell, journals, blow["at"]) if cell.goes_on_without else None
    record["outcome"] = _outcome(cell, record, done)
    if record["outcome"] not in GOOD:
        record["said"] = [line.text for line in said][-60:]
    return record


def _gone_on_s(cell: Cell, journals: Dict[int, List[dict]], struck: float) -> Optional[float]:
    """Seconds until each survivor had ended the round under way or, in the last one, the job; None if one has not."""
    after = [
        [entry["at"] - struck for entry in journals.get(rank, []) if entry["kind"] in ("round", "end")]
        for rank in cell.others
    ]
    firsts = [min((at for at in one if at > 0), default=None) for one in after]
    return None if None in firsts else round(max(firsts), 3)


def _are_right(rounds: List[dict]) -> bool:
    """NumPy's job knows. Of others, all workers, at every start, must have the same bits after the same step."""
    digests: Dict[int, set] = {}
    for entry in rounds:
        digests.setdefault(entry["round"], set()).add(entry.get("digest"))
    return all(entry.get("right", True) for entry in rounds) and all(len(found) == 1 for found in digests.values())


def _outcome(cell: Cell, record: dict, done: set) -> str:
    """In the order of what is worst."""
    if record["weights"] == "wrong":
        return "wrong"
    if record["code"] is None:
        return "hung"
    if record["hit"] is None or _is_too_late(record["moment"], record["hit"]):
        return "missed"
    if any(record["left"].values()):
        return "left something"
    if record["fault"] in GOES_ON or cell.is_outlived:
        is_complete = len(done) in cell.workers_at_end and record["rounds"] == cell.course.rounds
        came_back = record["code"] == 0 and is_complete
        back = {
            "depart": "departed", "return": "returned", **dict.fromkeys(REJOINS, "rejoined"),
            **dict.fromkeys(GROWS, "grew"), **dict.fromkeys(INHERITS, "inherited"),
            **dict.fromkeys(REGAINS, "regained"),
        }.get(cell.fault, "came back")  # fmt: skip
        back = "outlived" if cell.is_outlived else back
        return back if came_back else "stayed away"
    if record["code"] == 0:
        return "done" if len(done) == cell.workers else "unnoticed"
    if record["moment"] == "rendezvous":
        return "ended"  # `p3 run` does not wait for processes of a job that has not begun
    return "mute" if record["mute"] else "raised"


def _is_too_late(moment: str, hit: dict) -> bool:
    if moment == "snapshot":
        return hit["complete"]
    progress = {"first-round": "sent", "mid-push": "sent", "mid-broadcast": "landed"}.get(moment)
    return progress is not None and hit[progress] >= hit["slices"]


def _errors(cell: Cell, said: List[Line]) -> Dict[str, Line]:
    """The first error of each process, but of one that is dead."""
    found: Dict[str, Line] = {}
    for line in said:
        source = _SOURCE.match(line.text)
        error = _ERROR.search(source.group(2)) if source else None
        if error and (source.group(1) != str(cell.victim) or _speaks(cell)):
            found.setdefault(source.group(1), Line(line.at, re.sub("^the job failed: ", "", error.group(1))))
    return found


def _speaks(cell: Cell) -> bool:
    """Whether the victim has to say how it ended, as it lives, and the job ends with it."""
    return cell.is_cut and not cell.goes_on_without


def _names(cell: Cell, text: str) -> bool:
    return any(f"{victim} (" in text for victim in cell.hit)
