"""Room for the sockets and pipes of many processes: the limit on open files is often 1,024, the hard one far above."""

from __future__ import annotations

import os
import resource

from p3.errors import ConfigError

# Of one process of the job, measured: pipes of what `p3 run` starts; the scheduler's connections to a node; one between
# a worker and a server, or the leader of its machine.
PER_PROCESS = 4
PER_NODE, PER_NODE_TLS = 2, 10
PER_VAN, PER_VAN_TLS, PER_LOCAL_VAN = 1, 3, 6
_MARGIN = 64  # for whatever else the process opens


def provide(count: int, who: str, purpose: str, spare: int = _MARGIN) -> None:
    """Raises this process's soft limit until `count` more files can be open, and `spare` ones if the hard limit allows.
    ConfigError if that does not allow `count`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < needed:
        raise ConfigError(
            "%s: %d open files are needed for %s, and this process may have %d. Raise the hard limit where it is "
            "started: ulimit -Hn %d as root; nofile in /etc/security/limits.conf for logins, ssh's among them; "
            "LimitNOFILE= of systemd; --ulimit nofile= of docker" % (who, needed, purpose, hard, needed + spare)
        )
    if soft != unlimited and soft < needed + spare:
        wanted = needed + spare if hard == unlimited else min(hard, needed + spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
