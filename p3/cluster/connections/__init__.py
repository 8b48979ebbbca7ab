"""Every connection of a job, from the first byte until what it is for is settled.

    auth.py         both ends prove that they know the secret
    strangers.py    limits those that have not proved it
    channel.py      handshakes and messages over a socket
    encryption.py   TLS below that, and below the core's frames
    vans.py         opens and takes the data connections
    frames.py       what the scheduler sees on those that only watch
    descriptors.py  room for all of them
"""
