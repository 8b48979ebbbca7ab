cdef extern from "p3/tls_stream.h" namespace "p3" nogil:
    cdef cppclass TlsStream:
        TlsStream(int, int, const string&, cbool) except +raise_as_python
        @staticmethod
        cbool built_in() noexcept
        cbool writes_in_kernel() noexcept
        void end_writing() noexcept
        void close() noexcept


cdef extern from *:
    """
    #include "p3/tls_stream.h"

    namespace {

    // 0: done, 1: wait until readable, 2: until writable.
    int shake_hands(p3::TlsStream* stream) { return static_cast<int>(stream->handshake()); }

    // Bytes moved, 0 where nothing can move now. -1 where the other end has gone; other errors are thrown.
    long moved_or_end(const p3::IoResult& result) {
      if (result.bytes > 0 || result.error == EAGAIN) return static_cast<long>(result.bytes);
      if (result.error == 0) return result.end ? -1 : 0;
      if (result.error == ECONNRESET || result.error == EPIPE) return -1;
      throw p3::Error(p3::ErrorKind::kPeerLost, result.error == EBADMSG ? "TLS refuses what came: altered on the way"
                                                                         : strerror(result.error));
    }

    long tls_read(p3::TlsStream* stream, char* data, size_t size) {
      const iovec part{data, size};
      return moved_or_end(stream->read(&part, 1));
    }

    long tls_write(p3::TlsStream* stream, const char* data, size_t size) {
      const iovec part{const_cast<char*>(data), size};
      return moved_or_end(stream->write(&part, 1));
    }

    }  // namespace
    """
    int shake_hands(TlsStream*) except +raise_as_python nogil
    long tls_read(TlsStream*, char*, size_t) except +raise_as_python nogil
    long tls_write(TlsStream*, const char*, size_t) except +raise_as_python nogil


TLS_BUILT_IN = TlsStream.built_in()


cdef class Tls:
    cdef TlsStream* stream
    cdef readonly int read_fd, write_fd

    def __cinit__(self, int fd, bytes key not None, cbool connects, *, int notsent_low_water_bytes=131072):
        self.stream = new TlsStream(fd, notsent_low_water_bytes, key, connects)
        self.read_fd = (<Stream*>self.stream).read_fd()
        self.write_fd = (<Stream*>self.stream).write_fd()

    def __dealloc__(self):
        del self.stream

    cdef TlsStream* still_here(self) except NULL:
        if self.stream == NULL:
            raise ValueError("this TLS connection belongs to the core by now")
        return self.stream

    def handshake(self):
        return ("done", "read", "write")[shake_hands(self.still_here())]

    def read(self, int size):
        cdef bytes data = PyBytes_FromStringAndSize(NULL, size)
        cdef long moved = tls_read(self.still_here(), <char*>data, size)
        if moved == 0:
            return None
        return data[:max(moved, 0)]

    def write(self, data):
        cdef const unsigned char[::1] view = data
        if view.shape[0] == 0:
            return 0
        cdef long moved = tls_write(self.still_here(), <const char*>&view[0], view.shape[0])
        if moved < 0:
            raise BrokenPipeError("the other end has gone")
        return moved

    def end_writing(self):
        self.still_here().end_writing()

    def close(self):
        if self.stream != NULL:
            self.stream.close()

    @property
    def writes_in_kernel(self):
        return self.still_here().writes_in_kernel()


# For stream_of(): the core's from here on; null for None.
cdef TlsStream* released(Tls tls) except? NULL:
    if tls is None:
        return NULL
    cdef TlsStream* stream = tls.still_here()
    tls.stream = NULL
    return stream
