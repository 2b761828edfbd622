# Tasks over threads: one parallel loop, and the run of a whole call around it.

ctypedef void (*Step)(Call*, Py_ssize_t, Task*) noexcept nogil
ctypedef void (*Phase)(Call*) noexcept nogil

cdef enum:
    LOCAL_BYTES = 32 * 1024            # scratch of small calls on the stack: the allocator takes 0.2 microseconds


cdef int start(Call* call, Phase divide_call, Phase compute_call, int threads, bint explicit) except -1:
    """Divide the call, allocate, compute, free; raises KeyboardInterrupt, or what another signal handler raised.

    A call that is too short for several threads keeps the GIL: releasing it takes longer than computing.
    """
    cdef int taken
    cdef bint shared = worth_threads(&call.p)
    cdef char[LOCAL_BYTES] local
    cdef size_t tables = 0
    if call.p.rows * call.p.batches * call.p.kv_heads == 0:
        return 0
    taken = enter_threads(threads if shared else 1, explicit)
    call.p.n_threads = tracing.threads if shared and tracing.threads else taken
    try:
        if call.p.relative_index != NULL:
            tables = measure_tables(&call.p, call.format)
        divide_call(call)
        call.bytes = padded(call.bytes) + tables
        call.memory = scratch_memory(call.bytes, local, LOCAL_BYTES)
        if call.memory == NULL:
            raise MemoryError(f"attnc: no memory for {call.bytes} bytes of scratch")
        call.scratch = call.memory
        call.p.tables = call.memory + call.bytes - tables
        call.next_poll = seconds() + POLL_SECONDS
        try:
            if shared:
                with nogil:
                    compute_all(call, compute_call)
            else:
                compute_all(call, compute_call)
        finally:
            free_scratch(call.memory, local, LOCAL_BYTES)
    finally:
        leave_threads(taken)
    if call.p.stop:
        raise_pending()
    return 0


cdef void compute_all(Call* call, Phase compute_call) noexcept nogil:
    if call.p.relative_index != NULL:
        run(call, pack_table_step, tables_of_call(&call.p))
    compute_call(call)


cdef Py_ssize_t tables_of_call(const Params* p) noexcept nogil:
    return count_tables(&p.relative_key, p.q_heads) + count_tables(&p.relative_query, p.q_heads)


cdef void pack_table_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    call.kernels.pack_table(call, i)


cdef void run(Call* call, Step step, Py_ssize_t n, Py_ssize_t together=1) noexcept nogil:
    """Give tasks 0 .. n in order, `together` at a time, to free threads. Tasks write disjoint memory: no lock."""
    cdef Py_ssize_t i, shares = ceil_div(n, together)
    cdef int threads
    if tracing.threads:
        run_traced(call, step, n, together)
        return
    threads = possible_threads(<int> ix_min(call.p.n_threads, shares))
    if threads == 1:                # a parallel region of one thread would cost a microsecond
        for i in range(shares):
            run_tasks(call, step, i * together, ix_min(n, (i + 1) * together), 0)
        return
    for i in prange(shares, schedule="dynamic", chunksize=1, num_threads=threads):
        run_tasks(call, step, i * together, ix_min(n, (i + 1) * together), threadid())


cdef void run_traced(Call* call, Step step, Py_ssize_t n, Py_ssize_t together) noexcept nogil:
    """run() on one thread, which records the time of each share (Trace of call/process.h)."""
    cdef Py_ssize_t i
    cdef double began
    tracing.phase += 1
    for i in range(ceil_div(n, together)):
        began = thread_seconds()
        run_tasks(call, step, i * together, ix_min(n, (i + 1) * together), 0)
        record(began)


cdef void run_tasks(Call* call, Step step, Py_ssize_t first, Py_ssize_t stop, int thread) noexcept nogil:
    cdef fp_state state
    cdef Task task
    cdef Packed packed
    cdef void* s
    cdef Py_ssize_t i
    if call.p.stop:
        return
    state = fp_enter()
    carve_task(&call.p, call.format, call.scratch + thread * call.p.scratch_bytes, &task)
    task.thread = thread
    s, packed = task.s, task.packed
    for i in range(first, stop):
        task.s, task.packed = s, packed         # a step may have changed them
        step(call, i, &task)
    fp_leave(state)
    add_atomically(&call.done, stop - first)
    poll(call, thread)
