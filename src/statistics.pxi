# Statistics of the weights. Those of rows are taken beside the softmax (attention/forward.h). Those of keys are sums over rows
# whose norm is known: a task owns a range of keys of one kv head and walks the rows in order, so that nothing is added
# between threads.

cdef enum:
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


cdef int request_rows(RowRequest* w, object request, Pointers* at) except -1:
    w.norm, w.given = <double*> pointer(request.norm, at), pointer(request.given, at)
    w.entropy, w.max = pointer(request.entropy, at), pointer(request.max, at)
    w.position, w.distance = pointer(request.mean_position, at), pointer(request.mean_distance, at)
    w.top, w.top_keys, w.k = pointer(request.top, at), <int64_t*> pointer(request.top_keys, at), request.k
    w.sums = w.entropy != NULL or w.position != NULL or w.distance != NULL
    w.any = 1
    return 0


cdef int request_keys(KeyRequest* w, object request, Pointers* at) except -1:
    w.norm, w.given = <double*> pointer(request.norm, at), pointer(request.given, at)
    w.row_weights, w.order, w.walk = pointer(request.row_weights, at), <int64_t*> pointer(request.order, at), request.walk
    w.mass, w.max, w.visible = pointer(request.mass, at), pointer(request.max, at), pointer(request.visible, at)
    w.hits, w.threshold = <int64_t*> pointer(request.hits, at), request.threshold
    w.map, w.map_max = pointer(request.map, at), request.map_max
    w.row_bin, w.bin_rows = <int64_t*> pointer(request.row_bin, at), <double*> pointer(request.bin_rows, at)
    w.row_bins = len(request.bin_rows) if request.bin_rows is not None else 0
    w.key_bins = request.key_bins
    w.slot, w.slot_start = <int64_t*> pointer(request.slot, at), <int64_t*> pointer(request.slot_start, at)
    w.slot_bin = <int64_t*> pointer(request.slot_bin, at)
    w.products, w.factors = pointer(request.products, at), pointer(request.factors, at)
    w.columns, w.nonfinite_factors = request.columns, request.nonfinite_factors
    return 0


def row_statistics(args, int threads, bint explicit, request, progress=None, *, value=None, out=None, lse=None, weights=None,
                   key_scale=None, value_scale=None):
    """Statistics of rows into the arrays of a RowRequest (attnc/_call.py), beside what attend() gives.

    `progress` is None or a function of (done, total). Returns the natural score per unit of the row maxima in `norm`.
    """
    cdef Call call
    cdef Params* p = &call.p
    cdef Py_ssize_t shape[64]
    cdef Views views
    cdef Pointers pointers
    open_call(&call, &views)
    pointers.held = 0
    try:
        set_sizes(p, shape, args)
        open_operands(p, args, &views)
        open_value(p, args, value, &views)
        take(&views, out, &p.out, ALL_AXES, True)
        take(&views, lse, &p.lse, HEAD | ROW, True)
        take(&views, weights, &p.weights, ALL_AXES, True)
        take(&views, key_scale, &p.key_scale, HEAD | ROW)
        take(&views, value_scale, &p.value_scale, HEAD | ROW)
        call.progress = NULL if progress is None else <void*> progress
        # The states of few rows hold no statistics, so these take a second pass.
        if p.out.data != NULL and p.rows <= SIZES.few_rows:
            finish_call(&call, ATTEND, threads, explicit)
            p.out.data = p.lse.data = p.weights.data = NULL
            p.value_dim = p.kept_scores = 0
        request_rows(&p.row_request, request, &pointers)
        finish_call(&call, ATTEND, threads, explicit)
        return p.unit
    finally:
        close_arrays(&views)
        close_pointers(&pointers)


def key_statistics(args, int threads, bint explicit, request, progress=None):
    """Statistics of keys into the arrays of a KeyRequest (attnc/_call.py)."""
    cdef Call call
    cdef Py_ssize_t shape[64]
    cdef Views views
    cdef Pointers pointers
    open_call(&call, &views)
    pointers.held = 0
    try:
        set_sizes(&call.p, shape, args)
        open_operands(&call.p, args, &views)
        call.progress = NULL if progress is None else <void*> progress
        request_keys(&call.p.key_request, request, &pointers)
        prepare(&call, KEY_STATISTICS)
        start(&call, divide_keys, compute_key_statistics, threads, explicit)
    finally:
        close_arrays(&views)
        close_pointers(&pointers)


def weights_under_norm(args, int threads, bint explicit, progress=None, *, weights, norm=None, given=None):
    """Weights of every place, given the norm of each row that row_statistics() wrote, or its lse."""
    cdef Call call
    cdef Py_ssize_t shape[64]
    cdef Views views
    cdef Pointers pointers
    open_call(&call, &views)
    pointers.held = 0
    try:
        set_sizes(&call.p, shape, args)
        open_operands(&call.p, args, &views)
        take(&views, weights, &call.p.weights, ALL_AXES, True)
        call.progress = NULL if progress is None else <void*> progress
        call.p.key_request.norm, call.p.key_request.given = <double*> pointer(norm, &pointers), pointer(given, &pointers)
        finish_call(&call, WEIGHTS_UNDER_LSE, threads, explicit)
    finally:
        close_arrays(&views)
        close_pointers(&pointers)
