TLS_BUILT_IN = TlsStream.built_in()  # whether this build has OpenSSL


cdef class Tls:
    """A TLS connection before the core takes it over (include/p3/tls_stream.h), or one that Python keeps.

    Owns `fd`. `key`: 32 bytes that the other end has, too. `connects`: the client of the two.
    """

    cdef TlsStream* stream
    cdef readonly int read_fd, write_fd  # readable while read() may move bytes or tell the end

    def __cinit__(self, int fd, bytes key not None, cbool connects):
        self.stream = new_tls_stream(fd, key, connects)
        self.read_fd = self.stream.read_fd()
        self.write_fd = self.stream.write_fd()

    def __dealloc__(self):
        del self.stream

    cdef TlsStream* still_here(self) except NULL:
        if self.stream == NULL:
            raise ValueError("this TLS connection belongs to the core by now")
        return self.stream

    def handshake(self):
        """"done", or what to wait for: "read", "write". P3Error: the other end has not the same key, or (peer_lost) has
        gone."""
        return ("done", "read", "write")[shake_hands(self.still_here()[0])]

    def read(self, int size):
        """None: nothing now; b"": the other end has gone. P3Error: altered on the way, or lost."""
        cdef bytes data = PyBytes_FromStringAndSize(NULL, size)
        cdef int64_t moved = read_some(self.still_here()[0], <char*>data, size)
        return None if moved == 0 else data[:max(moved, 0)]

    def write(self, data):
        """How much was taken; the rest must be offered next. BrokenPipeError: the other end has gone."""
        cdef const unsigned char[::1] view = data
        if view.shape[0] == 0:
            return 0
        cdef int64_t moved = write_some(self.still_here()[0], <const char*>&view[0], view.shape[0])
        if moved < 0:
            raise BrokenPipeError("the other end has gone")
        return moved

    def end_writing(self):
        self.still_here().end_writing()

    def close(self):
        if self.stream != NULL:
            self.stream.close()


# For stream_of(): the core's from here on; null for None.
cdef TlsStream* released(Tls tls) except? NULL:
    if tls is None:
        return NULL
    cdef TlsStream* stream = tls.still_here()
    tls.stream = NULL
    return stream
