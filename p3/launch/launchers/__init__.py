"""`p3 exec` and `p3 doctor` in a process that another launcher has started: srun, mpirun, torchrun, a Kubernetes Job.

Such a launcher starts workers alone, and tells each its place by variables of its own.

    adapters.py   which launchers there are, and where each of them says what: a table
    place.py      what P3 makes of that: the launcher, rank, size, machine
    pmi.py        what MPICH's launcher tells only who asks
    options.py    what the command line says about that
    meeting.py    where rank 0 says where its scheduler is, and what the secret is
    channels.py   what that goes through: a file, nothing at all, or, in torch_store.py, torch's own store
    nodes.py      starts the scheduler and the servers beside the workers
    lifeline.py   between the processes of one machine, which end together
    supervise.py  runs the worker's command, ends all with it, and has the exit code

docs/launchers.md shows each of them at work.
"""
