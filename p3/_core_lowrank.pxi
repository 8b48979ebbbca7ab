# The arithmetic of low-rank compression that has to give the same bits on every worker
# (src/numeric/products/low_rank.h). Matrices are float32, in C order; ValueError if one has another number of bytes than
# its shape.


cdef take_matrix(what, memory, Py_buffer* view, Py_ssize_t elements, int flags):
    PyObject_GetBuffer(memory, view, flags)
    if view.len != elements * <Py_ssize_t>sizeof(float):
        found = view.len
        PyBuffer_Release(view)
        raise ValueError(f"{what} has {found} bytes; its shape has {elements * sizeof(float)}")


def orthonormalise(matrix not None, Py_ssize_t rows, Py_ssize_t columns, instead=None):
    """Makes the columns orthonormal, in place; a dependent one by that of `instead`, of the same shape, or zero."""
    cdef Py_buffer of_matrix, of_instead
    cdef const float* other = NULL
    take_matrix("the matrix", matrix, &of_matrix, rows * columns, PyBUF_WRITABLE)
    try:
        if instead is not None:
            take_matrix("what is taken instead", instead, &of_instead, rows * columns, PyBUF_SIMPLE)
            other = <const float*>of_instead.buf
        with nogil:
            c_orthonormalise(<float*>of_matrix.buf, rows, columns, other)
        if other != NULL:
            PyBuffer_Release(&of_instead)
    finally:
        PyBuffer_Release(&of_matrix)


def multiply_thin(left not None, right not None, product not None, Py_ssize_t rank):
    """product = left right^T, of `rank` columns each."""
    cdef Py_buffer of_left, of_right, of_product
    cdef Py_ssize_t rows = len(left), columns = len(right)
    take_matrix("the left matrix", left, &of_left, rows * rank, PyBUF_SIMPLE)
    try:
        take_matrix("the right matrix", right, &of_right, columns * rank, PyBUF_SIMPLE)
        try:
            take_matrix("the product", product, &of_product, rows * columns, PyBUF_WRITABLE)
            with nogil:
                c_multiply_thin(<const float*>of_left.buf, <const float*>of_right.buf, rows, columns, rank,
                                <float*>of_product.buf)
            PyBuffer_Release(&of_product)
        finally:
            PyBuffer_Release(&of_right)
    finally:
        PyBuffer_Release(&of_left)
