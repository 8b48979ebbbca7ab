"""Looking at a job while it runs: what its processes report, and who gets to see it.

    history.py    totals of one process at several moments, and what they make in a second
    report.py     what a worker and a server tell of themselves, when the scheduler asks
    view.py       what all of them make of the job: tables of workers, servers and links
    watching.py   the scheduler's part: asks while somebody watches, and tells those who do
    watcher.py    the other end: `p3 run` and `p3 top`
    words.py      a view in one line
    metrics.py    a view for Prometheus
"""
