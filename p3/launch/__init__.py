"""How the processes of a job are started, and end together: `p3 run`, `p3 exec`.

    run.py         `p3 run`: all processes of a job, their output, and one end
    placement.py   which process runs where
    engines.py     what starts them: this machine and ssh; or Ray, in ray/
    execute.py     `p3 exec`: this process becomes the node that its environment describes
    restarts.py    whether, when and where what was lost starts again; elastic.py: with how many workers
    output.py      many processes, one terminal; writer.py: which nobody waits for
    commands/      the options of `p3 run`, `p3 exec` and `p3 join`
    launchers/     `p3 exec` in what another launcher has started: srun, mpirun, torchrun, a Kubernetes Job
"""
