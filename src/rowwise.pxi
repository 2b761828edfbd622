# Stand-alone softmax: rows, or strips of rows that are neighbours, over threads, several a task.

cdef struct RowWork:
    RowOp op
    char* scratch
    Py_ssize_t scratch_bytes           # of a thread
    Py_ssize_t pieces, of_a_task       # rows or strips
    double next_poll
    Flag stop


cdef enum:
    ROW_TASK = 65536                   # elements of a task, about 10 microseconds of work
    LEAST_PARALLEL_ROWS = 65536        # elements below which a call stays on one thread, 14 microseconds alone
    OWN_TASKS = 4                      # of a thread, up to which it has the same in each call: they may be in its cache
    STRIP_BYTES = 1024 * 1024          # of the elements of a strip, as far as that leaves it
    LEAST_STRIP = 4                    # vectors: (8192, 4096) takes twice as long with two
    STREAM_BYTES = 32 * 1024 * 1024    # of input and output, beyond which the output passes the caches by
    # Of neighbours that a thread has for itself where they lie in cache: what is fetched ahead of strided writes takes
    # lines from the thread beside it. (1024, 128) along axis 0: 57 microseconds by two, 35 by one; (1024, 512): 222, 162
    OWN_BYTES = 2048


cdef Py_ssize_t size_of(RowOp* op) noexcept nogil:
    return 4 if op.x.dtype == F32 else 8 if op.x.dtype == F64 else 2


cdef Py_ssize_t lead_of(RowOp* op) noexcept nogil:
    """Columns in front of the first that begins a line of out, if it does so in each row."""
    cdef Py_ssize_t past = <Py_ssize_t> op.out.data & 63
    return (64 - past) // size_of(op) if past and past % size_of(op) == 0 and op.out.col % 64 == 0 else 0


cdef Py_ssize_t columns_of(RowOp* op) noexcept nogil:
    """The length of the last batch axis, if elements are neighbours along it and not along the row; or 0."""
    cdef Py_ssize_t n = op.x.n_batch, size = size_of(op)
    if n == 0 or op.x.col == size and op.out.col == size:
        return 0
    if op.x.strides[n - 1] != size or op.out.strides[n - 1] != size:
        return 0
    op.where.row = op.where.strides[n - 1] if op.where.data != NULL else 0
    return op.x.shape[n - 1] if op.x.shape[n - 1] > 1 else 0


cdef void divide_rows(RowWork* w, int threads) noexcept nogil:
    """Rows or strips, those of a task, and the scratch of a thread."""
    cdef RowOp* op = &w.op
    cdef Py_ssize_t real = TILES[op.type].real, lanes = TILES[op.type].lanes
    cdef Py_ssize_t kept = op.n if op.n * real <= ROW_KEPT else ROW_CHUNK // real, slices, strips
    if op.columns == 0:
        # As many tasks for one thread as for another.
        w.pieces = op.rows
        w.of_a_task = ceil_div(op.rows, round_up(ceil_div(op.rows, most(1, ROW_TASK // op.n)), threads))
        w.scratch_bytes = (3 * TOGETHER + 1 if kept * real <= ROW_IN_TURN else 2) * round_up(kept, lanes) * real + 64
        w.scratch_bytes += 2 * ROW_GAP
        return
    op.strip = STRIP
    while op.strip > LEAST_STRIP and op.strip * kept * lanes * real > STRIP_BYTES:
        op.strip //= 2
    while op.strip > 1 and op.rows < threads * op.strip * lanes:
        op.strip //= 2
    op.lead = lead_of(op) if op.columns > op.strip * lanes else 0
    if op.lead > op.strip * lanes:      # more than the scratch of a strip holds
        op.lead = 0
    slices = op.rows // op.columns
    strips = ceil_div(op.columns - op.lead, op.strip * lanes) + (op.lead > 0)
    w.pieces = slices * strips
    # A long call's tasks hold several strips: one is read while the one before is written. In cache they are neighbours.
    w.of_a_task = most(least(16, w.pieces // (4 * threads)), most(1, ROW_TASK // (op.n * op.strip * lanes)))
    if not op.stream:
        w.of_a_task = round_up(w.of_a_task, strips) if slices >= threads else ceil_div(strips, ceil_div(threads, slices))
    w.scratch_bytes = kept * op.strip * lanes * real + (SCRATCH_GAP if threads > 1 else 0)


cdef int at_most(RowOp* op, int threads) noexcept nogil:
    """The threads asked for (see enter_threads), or as many as have OWN_BYTES each."""
    cdef Py_ssize_t most_threads
    if op.columns == 0 or op.stream:
        return threads
    most_threads = op.rows // op.columns * most(1, op.columns * size_of(op) // OWN_BYTES)
    return <int> least(threads, most_threads) if threads > 0 else <int> most(threads, -most_threads)


cdef int start_rows(RowWork* w, int threads, bint explicit) except -1:
    cdef int taken
    cdef bint shared = w.op.rows * w.op.n >= LEAST_PARALLEL_ROWS
    w.op.stream = w.op.x.data != w.op.out.data and w.op.rows * w.op.n > STREAM_BYTES // (2 * size_of(&w.op))
    if w.op.rows * w.op.n == 0:
        return 0
    taken = enter_threads(at_most(&w.op, threads) if shared else 1, explicit)
    try:
        divide_rows(w, taken)
        w.scratch = <char*> aligned_memory(w.scratch_bytes * taken)
        if w.scratch == NULL:
            raise MemoryError("attnc: no memory for the softmax buffers")
        try:
            if shared:
                with nogil:
                    run_rows(w, taken)
            else:                           # see start() of the tiles
                run_rows(w, taken)
        finally:
            free_aligned(w.scratch)
    finally:
        leave_threads(taken)
    if w.stop:
        raise_pending()
    return 0


cdef void run_rows(RowWork* w, int threads) noexcept nogil:
    cdef Py_ssize_t i, n = ceil_div(w.pieces, w.of_a_task)
    w.next_poll = seconds() + 0.05
    w.op.stopped, w.op.call = rows_stopped, w
    threads = possible_threads(<int> least(threads, n))
    if threads == 1:                    # see run() of the tiles
        for i in range(n):
            rows_step(w, i, 0)
        return
    if n <= OWN_TASKS * threads:
        for i in prange(n, schedule="static", chunksize=1, num_threads=threads):
            rows_step(w, i, threadid())
        return
    for i in prange(n, schedule="dynamic", chunksize=1, num_threads=threads):
        rows_step(w, i, threadid())


cdef void rows_step(RowWork* w, Py_ssize_t i, int thread) noexcept nogil:
    cdef fp_state state
    cdef const Tile* tile = &TILES[w.op.type]
    cdef Py_ssize_t first = i * w.of_a_task, last = least(w.pieces, first + w.of_a_task)
    if w.stop:
        return
    state = fp_enter()
    if w.op.y.data != NULL:
        tile.softmax_backward_rows(&w.op, first, last, w.scratch + thread * w.scratch_bytes)
    elif w.op.columns:
        tile.softmax_strips(&w.op, first, last, w.scratch + thread * w.scratch_bytes)
    else:
        tile.softmax_rows(&w.op, first, last, w.scratch + thread * w.scratch_bytes)
    fp_leave(state)
    poll_rows(w, thread)


cdef int rows_stopped(void* call) noexcept nogil:
    """Within a long row, whose task has no end soon."""
    poll_rows(<RowWork*> call, threadid())
    return (<RowWork*> call).stop


cdef void poll_rows(RowWork* w, int thread) noexcept nogil:
    """As poll() of the tiles."""
    if thread == 0 and seconds() > w.next_poll:
        if run_signal_handlers():
            w.stop = 1
        w.next_poll = seconds() + 0.05
