"""Worker 1 is killed while thousands of rounds are under way on worker 0, each with operations behind it.

Argument: a file that worker 0 makes when all of them are.
"""

import os
import signal
import sys
from pathlib import Path

import mxnet as mx
from processes import wait_until

KEYS = [str(number) for number in range(3000)]


def main(mark):
    kv = mx.kv.create("p3_sync")
    kv.init(KEYS, [mx.nd.zeros(64)] * len(KEYS))
    mx.nd.waitall()
    if kv.rank == 1:
        wait_until(mark.exists, "worker 0 has not pushed", timeout_s=60)
        os.kill(os.getpid(), signal.SIGKILL)
    kv.push(KEYS, [mx.nd.ones(64)] * len(KEYS))
    values = [mx.nd.zeros(64) for _ in KEYS]
    kv.pull(KEYS, values)
    results = [value * 2 * 2 * 2 * 2 * 2 * 2 for value in values]
    mark.touch()
    raised = []
    for result in results:
        try:
            result.wait_to_read()
        except mx.MXNetError as error:
            raised.append(str(error))
    try:
        mx.nd.waitall()
    except mx.MXNetError as error:
        raised.append(str(error))
    assert len(raised) >= len(KEYS) and all("worker 1" in text for text in raised)
    print("worker 0 has come to its end", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
