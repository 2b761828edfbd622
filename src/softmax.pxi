# Stand-alone softmax over threads: a task has several rows, or several groups of columns (softmax/softmax_columns.h).

cdef enum:
    ROW_TASK = 65536                   # elements of a task, about 10 microseconds of work
    MIN_PARALLEL_ELEMENTS = 65536      # elements from which threads share a call: 14 microseconds on one thread
    OWN_TASKS = 4                      # most tasks per thread with static order: a thread gets the rows in its cache
    GROUP_BYTES = 1024 * 1024          # largest buffer of a group of columns with more than the fewest vectors
    MIN_COLUMN_VECTORS = 4             # even for long rows: (8192, 4096) along axis 0 takes twice as long with two
    STREAM_BYTES = 32 * 1024 * 1024    # input and output of a call, above which output takes non-temporal stores
    # Fewest contiguous bytes of a slice per thread, in cache. With 64-byte vectors (Zen 5) hardware prefetches after
    # strided writes take lines from the other thread: along axis 0 (1024, 128) takes 57 microseconds on two threads, 35
    # on one; (1024, 512) 222 and 162. With 32-byte ones (Zen 4) 47 and 82; 168 and 331.
    OWN_BYTES = 256
    OWN_BYTES_OF_64 = 2048


cdef Py_ssize_t size_of(RowOp* op) noexcept nogil:
    return 4 if op.x.dtype == F32 else 8 if op.x.dtype == F64 else 2


cdef Py_ssize_t lead_of(RowOp* op) noexcept nogil:
    """Columns before the first whose output begins a cache line, if it does so at every element of its row; else 0."""
    cdef Py_ssize_t past = <Py_ssize_t> op.out.data & 63
    return (64 - past) // size_of(op) if past and past % size_of(op) == 0 and op.out.col % 64 == 0 else 0


cdef Py_ssize_t columns_of(RowOp* op) noexcept nogil:
    """The length of the last batch axis if elements are contiguous along it and not along the row, else 0."""
    cdef Py_ssize_t n = op.x.n_batch, size = size_of(op)
    if n == 0 or op.x.col == size and op.out.col == size:
        return 0
    if op.x.strides[n - 1] != size or op.out.strides[n - 1] != size:
        return 0
    op.where.row = op.where.strides[n - 1] if op.where.data != NULL else 0
    return op.x.shape[n - 1] if op.x.shape[n - 1] > 1 else 0


cdef void divide_rows(RowCall* call, int threads) noexcept nogil:
    """Set the number of pieces (rows or groups of columns), pieces per task, and the scratch per thread."""
    cdef RowOp* op = &call.op
    cdef Py_ssize_t real = FORMATS[op.type].real, lanes = FORMATS[op.type].lanes
    cdef Py_ssize_t kept = op.n if op.n * real <= ROW_KEPT else ROW_CHUNK // real, slices, groups
    if op.columns == 0:
        # Every thread gets the same number of tasks.
        call.pieces = op.rows
        call.of_a_task = ceil_div(op.rows, round_up(ceil_div(op.rows, ix_max(1, ROW_TASK // op.n)), threads))
        call.scratch_bytes = (3 * TOGETHER + 1 if kept * real <= ROW_IN_TURN else 2) * round_up(kept, lanes) * real + 64
        call.scratch_bytes += 2 * ROW_GAP
        return
    op.column_vectors = MAX_COLUMN_VECTORS
    while op.column_vectors > MIN_COLUMN_VECTORS and op.column_vectors * kept * lanes * real > GROUP_BYTES:
        op.column_vectors //= 2
    while op.column_vectors > 1 and op.rows < threads * op.column_vectors * lanes:
        op.column_vectors //= 2
    op.lead = lead_of(op) if op.columns > op.column_vectors * lanes else 0
    if op.lead > op.column_vectors * lanes:      # more than the scratch of a group holds
        op.lead = 0
    slices = op.rows // op.columns
    groups = ceil_div(op.columns - op.lead, op.column_vectors * lanes) + (op.lead > 0)
    call.pieces = slices * groups
    # A task has several groups, so that one is read while another is written; in cache they are neighbours.
    cdef Py_ssize_t in_cache = ix_max(1, ROW_TASK // (op.n * op.column_vectors * lanes))
    call.of_a_task = ix_max(ix_min(16, call.pieces // (4 * threads)), in_cache)
    if not op.stream:
        call.of_a_task = (round_up(call.of_a_task, groups) if slices >= threads
                          else ceil_div(groups, ceil_div(threads, slices)))
    call.scratch_bytes = kept * op.column_vectors * lanes * real + (SCRATCH_GAP if threads > 1 else 0)


cdef int at_most(RowOp* op, int threads) noexcept nogil:
    """The requested threads (see enter_threads()), at most as many as have OWN_BYTES each."""
    cdef Py_ssize_t max_threads, own = OWN_BYTES
    if op.columns == 0 or op.stream:
        return threads
    if FORMATS[op.type].lanes * FORMATS[op.type].real == 64:
        own = OWN_BYTES_OF_64
    max_threads = op.rows // op.columns * ix_max(1, op.columns * size_of(op) // own)
    return <int> ix_min(threads, max_threads) if threads > 0 else <int> ix_max(threads, -max_threads)


cdef int start_rows(RowCall* call, int threads, bint explicit) except -1:
    cdef int taken
    cdef bint shared = call.op.rows * call.op.n >= MIN_PARALLEL_ELEMENTS
    call.op.stream = (call.op.x.data != call.op.out.data
                      and call.op.rows * call.op.n > STREAM_BYTES // (2 * size_of(&call.op)))
    if call.op.rows * call.op.n == 0:
        return 0
    taken = enter_threads(at_most(&call.op, threads) if shared else 1, explicit)
    try:
        divide_rows(call, at_most(&call.op, tracing.threads) if shared and tracing.threads else taken)
        call.scratch = <char*> aligned_memory(call.scratch_bytes * taken)
        if call.scratch == NULL:
            raise MemoryError("attnc: no memory for the softmax buffers")
        try:
            if shared:
                with nogil:
                    run_rows(call, taken)
            else:                           # see start()
                run_rows(call, taken)
        finally:
            free_aligned(call.scratch)
    finally:
        leave_threads(taken)
    if call.stop:
        raise_pending()
    return 0


cdef void run_rows(RowCall* call, int threads) noexcept nogil:
    cdef Py_ssize_t i, n = ceil_div(call.pieces, call.of_a_task)
    cdef double began
    call.next_poll = seconds() + POLL_SECONDS
    if tracing.threads:
        tracing.phase += 1
        for i in range(n):
            began = thread_seconds()
            rows_step(call, i, 0)
            record(began)
        return
    threads = possible_threads(<int> ix_min(threads, n))
    if threads == 1:                    # see run()
        for i in range(n):
            rows_step(call, i, 0)
        return
    if n <= OWN_TASKS * threads:
        for i in prange(n, schedule="static", chunksize=1, num_threads=threads):
            rows_step(call, i, threadid())
        return
    for i in prange(n, schedule="dynamic", chunksize=1, num_threads=threads):
        rows_step(call, i, threadid())


cdef void rows_step(RowCall* call, Py_ssize_t i, int thread) noexcept nogil:
    cdef fp_state state
    cdef const Kernels* kernels = &KERNELS[call.op.type]
    cdef Py_ssize_t first = i * call.of_a_task, last = ix_min(call.pieces, first + call.of_a_task)
    if call.stop:
        return
    state = fp_enter()
    if call.op.y.data != NULL:
        kernels.softmax_backward(call, thread, first, last)
    elif call.op.columns:
        kernels.softmax_columns(call, thread, first, last)
    else:
        kernels.softmax_rows(call, thread, first, last)
    fp_leave(state)
    poll_rows(call, thread)
