"""Jobs whose nodes a test starts one by one."""

SOON_S = 10  # plus the start of the processes, which a busy machine can stretch

TRAIN = """
    import numpy as np
    from p3.worker.session import Session
    session = Session.open()
    landing = np.zeros((3, 40000), np.float32)
    key = session.declare("w", landing.shape, "float32")
    session.init(key, np.ones_like(landing) if session.rank == 0 else None, landing).wait(30)
    assert (landing == 1).all()
    for turn in range(5):
        session.pushpull(key, np.full_like(landing, session.rank + turn), landing).wait(30)
    session.barrier()
    print("rank", session.rank, "has", landing[0, 0], landing[-1, -1])
"""


def started(cluster, scripts, servers=1, env=None, **settings):
    """Scheduler, servers, then one worker per script with P3_RANK set; `env[i]` is for worker i alone."""
    nodes = [cluster.start("scheduler", **settings)]
    nodes += [cluster.start("server", **settings) for _ in range(servers)]
    for rank, script in enumerate(scripts):
        own = dict(settings, P3_RANK=str(rank), **(env or {}).get(rank, {}))
        nodes.append(cluster.start("worker", script, **own))
    return nodes


def all_ended(nodes, timeout_s=SOON_S + 10):
    return [node.wait(timeout_s) for node in nodes]


def assert_every_process_says(finished, text):
    for node in finished:
        assert node.code != 0, node
        assert text in node.err, node.err
        assert node.seconds < SOON_S + 10
