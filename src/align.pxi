# Alignment by dynamic time warping: median filter of a matrix's rows, largest path sum to each cell, and traceback.

cdef enum:
    DIAGONAL, SAME_ROW, PREVIOUS_ROW            # how a path reached a cell


def align_rows(block, line, window, sums, moves, bint first):
    """Compute path sums and uint8 moves of a block of rows of a float64 matrix; `first`: it begins with row 0.

    All arrays are contiguous. `sums` has the sums of the row before the block and receives those of its last row.
    `line` is scratch for a row, `window` for the elements of the median filter; a window of 1 is no filter.
    """
    cdef Py_buffer views[5]
    cdef const double* x
    cdef Py_ssize_t i, n
    cdef int held = 0
    try:
        held = take_arrays((block, line, window, sums, moves), views)
        n = views[0].shape[1]
        with nogil:
            for i in range(views[0].shape[0]):
                x = <double*> views[0].buf + i * n
                if views[2].shape[0] > 1:
                    filter_row(x, <double*> views[1].buf, n, <double*> views[2].buf, views[2].shape[0])
                    x = <double*> views[1].buf
                align_row(x, <double*> views[3].buf, <unsigned char*> views[4].buf + i * n, n, first and i == 0)
    finally:
        release(views, held)


def align_path(moves, rows, columns):
    """Write the path to the last cell to the ends of two int64 arrays; returns its first index in them."""
    cdef Py_buffer views[3]
    cdef Py_ssize_t i, j, n, at
    cdef int held = 0
    cdef unsigned char move
    try:
        held = take_arrays((rows, columns, moves), views)
        n, at = views[2].shape[1], views[0].shape[0] - 1
        i, j = views[2].shape[0] - 1, n - 1
        while True:
            (<int64_t*> views[0].buf)[at] = i
            (<int64_t*> views[1].buf)[at] = j
            if i == 0 and j == 0:
                return at
            move = (<unsigned char*> views[2].buf)[i * n + j]
            i -= move != SAME_ROW
            j -= move != PREVIOUS_ROW
            at -= 1
    finally:
        release(views, held)


cdef void filter_row(const double* x, double* y, Py_ssize_t n, double* window, Py_ssize_t width) noexcept nogil:
    """Median filter of `width` elements, reflected at both ends; `window` keeps them sorted."""
    cdef Py_ssize_t j, k, half = width // 2
    cdef double old, new
    for j in range(width):
        k, new = j, x[reflected(j - half, n)]
        while k > 0 and window[k - 1] > new:
            window[k] = window[k - 1]
            k -= 1
        window[k] = new
    for j in range(n):
        y[j] = window[half]
        if j == n - 1:
            break
        k, old, new = 0, x[reflected(j - half, n)], x[reflected(j + half + 1, n)]
        while window[k] != old:
            k += 1
        while k > 0 and window[k - 1] > new:
            window[k] = window[k - 1]
            k -= 1
        while k < width - 1 and window[k + 1] < new:
            window[k] = window[k + 1]
            k += 1
        window[k] = new


cdef Py_ssize_t reflected(Py_ssize_t j, Py_ssize_t n) noexcept nogil:
    return -j if j < 0 else j if j < n else 2 * (n - 1) - j


cdef void align_row(const double* x, double* sums, unsigned char* moves, Py_ssize_t n, bint first) noexcept nogil:
    """Update the path sums of the row before to this row's; a tie prefers the diagonal, then the same row."""
    cdef double diagonal = sums[0], above, best, before = x[0] if first else sums[0] + x[0]
    cdef Py_ssize_t j
    cdef int stays
    sums[0], moves[0] = before, PREVIOUS_ROW
    for j in range(1, n):
        if first:
            moves[j] = SAME_ROW
        else:
            above = sums[j]
            stays = (before > diagonal) & (before >= above)
            moves[j] = stays * SAME_ROW + (1 - stays) * (above > diagonal) * PREVIOUS_ROW      # without a branch
            best = above if above > diagonal else diagonal
            before = before if before > best else best
            diagonal = above
        before += x[j]
        sums[j] = before


cdef int take_arrays(tuple arrays, Py_buffer* views) except -1:
    """Open contiguous arrays; returns their number."""
    cdef int held = 0
    try:
        for array in arrays:
            PyObject_GetBuffer(array, &views[held], PyBUF_STRIDES)
            held += 1
    except BaseException:
        release(views, held)
        raise
    return held


cdef void release(Py_buffer* views, int held):
    cdef int i
    for i in range(held):
        PyBuffer_Release(&views[i])
