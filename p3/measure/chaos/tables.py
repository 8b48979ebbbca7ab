"""What a campaign has found, as Markdown: one table of outcomes for each fault, and what was counted over all runs."""

from __future__ import annotations

import statistics
from typing import Dict, List, Optional

from p3.measure.chaos.matrix import (
    BLOWS, COMES_BACK, DEPARTS, FAULTS, GOES_ON, GROWS, INHERITS, LOSES_SERVER, MOMENTS, NUMPY, REGAINS, REJOINS,
    ROLES, TRAININGS, is_outlived,
)  # fmt: skip

_UNTIL_ON = "until each survivor had ended the round under way, or the job"
BAD = ("wrong", "hung", "left something", "stayed away", "unnoticed", "mute", "missed")


def markdown(records: List[dict]) -> str:
    numpys = [record for record in records if record.get("training", NUMPY) == NUMPY]
    others = [record for record in records if record not in numpys]
    tables = [_table(fault, numpys) for fault in FAULTS] + [_table_of_trainings(others)]
    return "\n\n".join([_summary(records), *filter(None, tables)])


def _summary(records: List[dict]) -> str:
    def count(outcome: str) -> int:
        return sum(record["outcome"] == outcome for record in records)

    struck = [record for record in records if record["outcome"] != "missed"]
    running = [record for record in struck if record["moment"] != "rendezvous"]
    lines = [
        "| counted over all runs | |",
        "|---|---|",
        f"| runs, the moment was hit | {len(struck)} of {len(records)} |",
        f"| a weight was wrong | {count('wrong')} |",
        f"| hung | {count('hung')} |",
        f"| a process, socket, shared memory or temporary file was left | {count('left something')} |",
        f"| a survivor had to be ended by `p3 run` before it had said why | {count('mute')} |",
        f"| nobody noticed | {count('unnoticed')} |",
        f"| `p3 run` reported the cause, and failed unless it could go on |"
        f" {sum(bool(r['p3_run'] and (r['code'] or _goes_on(r))) for r in struck)} |",
        f"| restarted, and ended with the right weights | {count('came back')} of"
        f" {sum(r['fault'] in COMES_BACK for r in struck)} |",
        f"| the scheduler was replaced, and the weights were right | {count('outlived')} of"
        f" {sum(r['role'] == 'scheduler' and _goes_on(r) for r in struck)} |",
        f"| a worker departed, and the others went on with the right weights | {count('departed')} of"
        f" {sum(r['fault'] == 'depart' for r in struck)} |",
        f"| a worker was back about when it was given up, and the weights were right | {count('returned')} of"
        f" {sum(r['fault'] == 'return' for r in struck)} |",
        f"| another process joined in a lost worker's place, and the weights were right | {count('rejoined')} of"
        f" {sum(r['fault'] in REJOINS for r in struck)} |",
        f"| a further process joined while others were lost, and the weights were right | {count('grew')} of"
        f" {sum(r['fault'] in GROWS for r in struck)} |",
        f"| another server took over from a lost one, and the weights were right | {count('inherited')} of"
        f" {sum(r['fault'] in INHERITS for r in struck)} |",
        f"| both servers were lost and came back, and the weights were right | {count('regained')} of"
        f" {sum(r['fault'] in REGAINS for r in struck)} |",
        f"| errors of survivors that named whom the fault hit | {sum(r['names_victim'] for r in struck)} of"
        f" {sum(len(r['errors']) for r in struck)} |",
        f"| errors that named a round, of jobs that had begun | {sum(r['names_round'] for r in running)} of"
        f" {sum(len(r['errors']) for r in running)} |",
    ]
    return "\n".join(lines)


def _goes_on(record: dict) -> bool:
    return record["fault"] in GOES_ON or is_outlived(record["role"], record["fault"], record["moment"])


def _table(fault: str, records: List[dict]) -> Optional[str]:
    chosen = [record for record in records if record["fault"] == fault]
    if not chosen:
        return None
    by, columns = ("blow", BLOWS) if fault in (*DEPARTS, *LOSES_SERVER) else ("role", ROLES)
    until = _UNTIL_ON if fault in (*DEPARTS, *LOSES_SERVER) else "to the last error"
    lines = [
        f"**{fault}** ({FAULTS[fault]}): seconds from the fault {until}, and to the end of `p3 run`; median (most)",
        "",
        "| moment | " + " | ".join(columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for moment in MOMENTS:
        row = [[r for r in chosen if (r["moment"], r[by]) == (moment, column)] for column in columns]
        if any(row):
            lines.append(f"| {moment} | " + " | ".join(map(_cell, row)) + " |")
    return "\n".join(lines)


def _table_of_trainings(records: List[dict]) -> Optional[str]:
    if not records:
        return None
    columns = sorted({(record["fault"], record["moment"]) for record in records})
    lines = [
        "**Gluon**: a worker or a server killed in trainings that are difficult to recover; seconds as above",
        "",
        "| training | " + " | ".join(f"{fault}, {moment}" for fault, moment in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for training, what in TRAININGS.items():
        row = [[r for r in records if (r["training"], r["fault"], r["moment"]) == (training, *one)] for one in columns]
        if any(row):
            lines.append(f"| {training}: {what} | " + " | ".join(map(_cell, row)) + " |")
    return "\n".join(lines)


def _cell(records: List[dict]) -> str:
    if not records:
        return ""
    parts = []
    for name in ("on_s" if records[0]["fault"] in (*DEPARTS, *LOSES_SERVER) else "error_s", "end_s"):
        seconds = [record[name] for record in records if record[name] is not None]
        parts.append("%.1f (%.1f)" % (statistics.median(seconds), max(seconds)) if seconds else "none")
    bad: Dict[str, int] = {what: sum(r["outcome"] == what for r in records) for what in BAD}
    told = ", ".join(f"{count} {what}" for what, count in bad.items() if count)
    runs = "1 run" if len(records) == 1 else f"{len(records)} runs"
    return f"{runs}: {', '.join(parts)}" + (f"; **{told}**" if told else "")
