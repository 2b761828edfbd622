# Stand-alone softmax: rows over threads, several rows a task.

cdef struct RowWork:
    RowOp op
    char* scratch
    Py_ssize_t rows_of_a_task
    double next_poll
    int stop


cdef enum:
    ROW_SCRATCH = 2 * 16384 + 128      # two buffers of softmax.h
    ROW_TASK = 65536                   # elements of a task, about 30 microseconds of work
    LEAST_PARALLEL_ROWS = 2 * 65536         # elements below which threads cost more than they save


cdef int start_rows(RowWork* w, int threads, bint explicit) except -1:
    cdef int taken
    if w.op.rows * w.op.n == 0:
        return 0
    taken = enter_threads(threads if w.op.rows * w.op.n > LEAST_PARALLEL_ROWS else 1, explicit)
    try:
        w.rows_of_a_task = most(1, ROW_TASK // w.op.n)
        w.scratch = <char*> aligned_memory(ROW_SCRATCH * taken)
        if w.scratch == NULL:
            raise MemoryError("attnc: no memory for the softmax buffers")
        try:
            with nogil:
                run_rows(w, taken)
        finally:
            free_aligned(w.scratch)
    finally:
        leave_threads(taken)
    if w.stop:
        raise_pending()
    return 0


cdef void run_rows(RowWork* w, int threads) noexcept nogil:
    cdef Py_ssize_t i, n = ceil_div(w.op.rows, w.rows_of_a_task)
    w.next_poll = seconds() + 0.05
    threads = <int> least(threads, n)
    for i in prange(n, schedule="dynamic", chunksize=1, num_threads=threads, use_threads_if=threads > 1):
        rows_step(w, i, threadid())


cdef void rows_step(RowWork* w, Py_ssize_t i, int thread) noexcept nogil:
    cdef fp_state state
    cdef Py_ssize_t first = i * w.rows_of_a_task
    if w.stop:
        return
    state = fp_enter()
    TILES[w.op.type].softmax_rows(&w.op, first, least(w.op.rows, first + w.rows_of_a_task), w.scratch + thread * ROW_SCRATCH)
    fp_leave(state)
    if thread == 0 and seconds() > w.next_poll:
        if run_signal_handlers():
            w.stop = 1
        w.next_poll = seconds() + 0.05
