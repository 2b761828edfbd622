# Statistics of the weights. Those of rows are taken beside the softmax (attention/forward.h). Those of keys are sums over rows
# whose norm is known: a task owns a range of keys of one kv head and walks the rows in order, so that nothing is added
# between threads.

cdef enum:
    ROWS, KEYS, PLACES             # parts of `statistics`
    REQUESTS = 20
    MOST_KEY_BLOCK = 512
    LEAST_KEY_BLOCK = 128          # where keys are few, so that several threads have some
    KEY_BLOCK_BYTES = 256 * 1024
    MOST_CHUNKS = 32               # of keys in a map: each keeps sums of its own for every bin of rows
    WALK_ROWS = 192                # opened at a time
    HEAP_BYTES = 512 * 1024        # of the largest scores of a task's rows
    BIN_BYTES = 16 * 1024 * 1024   # of a round's parts of maps


cdef Py_ssize_t rows_of_heap(const Call* call) noexcept nogil:
    """How many rows a task may have if it keeps the largest scores of each."""
    cdef Py_ssize_t row = call.p.row_request.k * (call.format.real + 4)
    return most(1, HEAP_BYTES // most(row, 1) // GROUP_ROWS) * GROUP_ROWS


cdef Py_ssize_t key_block(Py_ssize_t kv_len, Py_ssize_t row_bytes) noexcept nogil:
    """Keys that are packed at once: the sums of a map are added in their order, so it follows from the sizes alone."""
    cdef Py_ssize_t block = MOST_KEY_BLOCK
    while block > LEAST_KEY_BLOCK and (block * row_bytes > KEY_BLOCK_BYTES or block * 4 > kv_len):
        block //= 2
    return block


cdef void divide_keys(Call* call) noexcept nogil:
    cdef Params* p = &call.p
    cdef KeyRequest* k = &p.key_request
    cdef Py_ssize_t heads = p.batches * p.kv_heads, per_head = 0
    cdef Task unused
    set_strides(call)
    p.value_stride = p.kept_scores = p.shared = 0
    p.parts = p.splits = 1
    p.block_k = key_block(p.kv_len, p.head_dim * call.format.real)
    p.split_k = p.k_blocks = ceil_div(p.kv_len, p.block_k)
    p.width = least(p.block_k, round_up(p.kv_len, call.format.panel))
    p.pack_bytes = packed_bytes(p, call.format)
    p.block_q = WALK_ROWS
    p.scratch_bytes = carve_task(p, call.format, <char*> &unused, &unused)
    call.chunk = ceil_div(p.k_blocks, MOST_CHUNKS) if k.map != NULL else 1
    call.chunks = ceil_div(p.k_blocks, call.chunk)
    call.heads = heads
    if k.map != NULL:
        per_head = p.group * k.row_bins * k.slot_start[call.chunks] * 8
        call.heads = least(heads, most(1, BIN_BYTES // most(per_head, 1)))
    call.bytes = p.scratch_bytes * p.n_threads + per_head * call.heads
    call.total = heads * (call.chunks + (1 if k.map != NULL else 0))


cdef void compute_key_statistics(Call* call) noexcept nogil:
    """All rounds of kv heads; a round holds as many as fit the memory for parts of maps."""
    cdef Params* p = &call.p
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    call.bins = <double*> (call.scratch + p.scratch_bytes * p.n_threads)
    call.first_head = 0
    while call.first_head < heads and not p.stop:
        call.heads = least(call.heads, heads - call.first_head)
        run(call, key_statistics_step, call.heads * call.chunks)
        if p.key_request.map != NULL:
            run(call, maps_step, call.heads)
        call.first_head += call.heads


cdef void key_statistics_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    call.kernels.key_statistics(call, t, i // call.chunks, i % call.chunks)


cdef void maps_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    call.kernels.maps(call, t, i)


def key_plan(int type, Py_ssize_t kv_len, Py_ssize_t head_dim):
    """(keys of a block, blocks of a chunk) of a map: its bins of keys are listed by chunk."""
    cdef Py_ssize_t block = key_block(kv_len, head_dim * FORMATS[type].real)
    return block, most(1, ceil_div(ceil_div(kv_len, block), MOST_CHUNKS))


cdef struct Pointers:
    Py_buffer view[REQUESTS]
    int held


cdef void* pointer(object x, Pointers* pointers) except? NULL:
    """The memory of a contiguous array, or NULL for None."""
    if x is None:
        return NULL
    PyObject_GetBuffer(x, &pointers.view[pointers.held], PyBUF_STRIDES)
    pointers.held += 1
    return pointers.view[pointers.held - 1].buf


cdef void close_pointers(Pointers* pointers):
    cdef int i
    for i in range(pointers.held):
        PyBuffer_Release(&pointers.view[i])


cdef int request_rows(RowRequest* w, tuple requests, Pointers* at) except -1:
    norm, entropy, largest, position, distance, top, top_keys, k, given = requests
    w.norm = <double*> pointer(norm, at)
    w.entropy, w.max = pointer(entropy, at), pointer(largest, at)
    w.position, w.distance = pointer(position, at), pointer(distance, at)
    w.top, w.top_keys, w.k = pointer(top, at), <int64_t*> pointer(top_keys, at), k
    w.given = pointer(given, at)
    w.sums = w.entropy != NULL or w.position != NULL or w.distance != NULL
    w.any = 1
    return 0


cdef int request_keys(KeyRequest* w, tuple requests, Pointers* at) except -1:
    (norm, given, row_weights, order, walk, mass, largest, visible, hits, threshold, map, map_max, row_bin, bin_rows, key_bins,
     slot, slot_start, slot_bin, products, factors, columns, nonfinite_factors) = requests
    w.norm, w.given, w.row_weights = <double*> pointer(norm, at), pointer(given, at), pointer(row_weights, at)
    w.order, w.walk = <int64_t*> pointer(order, at), walk
    w.mass, w.max, w.visible = pointer(mass, at), pointer(largest, at), pointer(visible, at)
    w.hits, w.threshold = <int64_t*> pointer(hits, at), threshold
    w.map, w.map_max, w.row_bin = pointer(map, at), map_max, <int64_t*> pointer(row_bin, at)
    w.bin_rows, w.key_bins = <double*> pointer(bin_rows, at), key_bins
    w.row_bins = len(bin_rows) if bin_rows is not None else 0
    w.slot, w.slot_start = <int64_t*> pointer(slot, at), <int64_t*> pointer(slot_start, at)
    w.slot_bin = <int64_t*> pointer(slot_bin, at)
    w.products, w.factors = pointer(products, at), pointer(factors, at)
    w.columns, w.nonfinite_factors = columns, nonfinite_factors
    return 0


def statistics(int part, tuple arrays, tuple batch, tuple sizes, tuple options, int threads, bint explicit,
               tuple requests, progress):
    """Statistics of the weights of one call; what `attention` takes, and which of them are wanted.

    part ROWS fills statistics of rows, beside the output if that is given; KEYS those of keys; PLACES writes weights
    under a norm. `requests` has the fields of RowRequest or KeyRequest (call/requests.h) in the order of request_rows and request_keys: C-contiguous
    arrays over (batch, q_heads, rows or keys), or None. `progress` is None or a function of (done, total). Returns the natural
    score per unit of the row maxima in `norm`.
    """
    cdef Call call
    cdef Params* p = &call.p
    cdef Py_ssize_t shape[64]
    cdef Views views
    cdef Pointers pointers
    cdef int mode = ATTEND if part == ROWS else KEY_STATISTICS if part == KEYS else WEIGHTS_UNDER_LSE
    memset(&call, 0, sizeof(Call))
    memset(&views.held, 0, sizeof(views.held))
    pointers.held = 0
    try:
        open_call(&call, mode, arrays, batch, sizes, options, shape, &views)
        call.progress = NULL if progress is None else <void*> progress
        if part == ROWS:
            # The states of few rows hold no statistics, so these take a second pass.
            if p.out.data != NULL and p.rows <= SIZES.few_rows:
                prepare(&call, mode)
                start(&call, divide, compute, threads, explicit)
                p.out.data = p.lse.data = p.weights.data = NULL
                p.value_dim = p.kept_scores = 0
            request_rows(&p.row_request, requests, &pointers)
        else:
            request_keys(&p.key_request, requests, &pointers)
        prepare(&call, mode)
        if part == KEYS:
            start(&call, divide_keys, compute_key_statistics, threads, explicit)
        else:
            start(&call, divide, compute, threads, explicit)
        return p.unit
    finally:
        close_arrays(&views)
        close_pointers(&pointers)
