"""Who of a job's workers is early and who is late, told by files instead of chance."""

import os
import time


class Turns:
    """Between two workers, told by files. Each is waited for by who must not go on before it has come."""

    def __init__(self, folder):
        self._folder = folder

    def come(self, turn):
        open(os.path.join(self._folder, turn), "w").close()

    def wait(self, turn):
        deadline = time.monotonic() + 30
        while not os.path.exists(os.path.join(self._folder, turn)):
            assert time.monotonic() < deadline, turn
            time.sleep(0.001)

    def behind(self, call, turn):
        """`call`, which waits for that turn first."""

        def waiting(*arguments, **keywords):
            self.wait(turn)
            return call(*arguments, **keywords)

        return waiting

    def before(self, call, turn):
        """`call`, which is an operation of the core, behind which the turn has come."""

        def telling(*arguments, **keywords):
            operation = call(*arguments, **keywords)
            operation.wait(30)
            self.come(turn)
            return operation

        return telling

    def within(self, barrier, turn):
        """`barrier`, in which the turn has come."""

        def telling(*arguments):
            self.come(turn)
            return barrier(*arguments)

        return telling
