# Statistics of the weights. Statistics of rows are computed beside the softmax (attention/forward.h). Statistics of
# keys are sums over rows whose norm is known: a task owns a range of keys of one kv head and walks the rows in order,
# so threads share no sums.

cdef enum:
    MAX_KEY_BLOCK = 512
    MIN_KEY_BLOCK = 128          # for short kv_len, so that several threads have a block
    KEY_BLOCK_BYTES = 256 * 1024
    MAX_CHUNKS = 32               # chunks of the keys of a map, each with its own sums for every bin of rows
    WALK_ROWS = 192                # rows of a step of a walk
    HEAP_BYTES = 512 * 1024        # heaps of the largest scores of a task's rows
    BIN_BYTES = 16 * 1024 * 1024   # partial maps of a round of kv heads


cdef Py_ssize_t rows_of_heap(const Call* call) noexcept nogil:
    """Rows of a task whose heaps of largest scores fit in HEAP_BYTES; whole register tiles."""
    cdef Py_ssize_t row = call.p.row_request.k * (call.format.real + 4)
    return ix_max(1, HEAP_BYTES // ix_max(row, 1) // GROUP_ROWS) * GROUP_ROWS


cdef Py_ssize_t key_block(Py_ssize_t kv_len, Py_ssize_t row_bytes) noexcept nogil:
    """Keys of a packed block. It fixes the order of the sums of a map, so it follows from the sizes alone."""
    cdef Py_ssize_t block = MAX_KEY_BLOCK
    while block > MIN_KEY_BLOCK and (block * row_bytes > KEY_BLOCK_BYTES or block * 4 > kv_len):
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
    p.width = ix_min(p.block_k, round_up(p.kv_len, call.format.panel))
    measure_key_products(p)
    p.pack_bytes = packed_bytes(p, call.format)
    p.block_q = WALK_ROWS
    p.scratch_bytes = carve_task(p, call.format, <char*> &unused, &unused)
    call.chunk = ceil_div(p.k_blocks, MAX_CHUNKS) if k.map != NULL else 1
    call.chunks = ceil_div(p.k_blocks, call.chunk)
    call.heads = heads
    if k.map != NULL:
        per_head = p.heads_per_kv * k.row_bins * k.slot_start[call.chunks] * 8
        call.heads = ix_min(heads, ix_max(1, BIN_BYTES // ix_max(per_head, 1)))
    call.bytes = p.scratch_bytes * p.n_threads + per_head * call.heads
    call.total = heads * (call.chunks + (1 if k.map != NULL else 0))


cdef void compute_key_statistics(Call* call) noexcept nogil:
    """Compute all rounds; a round has as many kv heads as have partial maps in BIN_BYTES."""
    cdef Params* p = &call.p
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    call.bins = <double*> (call.scratch + p.scratch_bytes * p.n_threads)
    call.first_head = 0
    while call.first_head < heads and not p.stop:
        call.heads = ix_min(call.heads, heads - call.first_head)
        run(call, key_statistics_step, call.heads * call.chunks)
        if p.key_request.map != NULL:
            run(call, maps_step, call.heads)
        call.first_head += call.heads


cdef void key_statistics_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    call.kernels.key_statistics(call, t, i // call.chunks, i % call.chunks)


cdef void maps_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    call.kernels.maps(call, t, i)


def key_plan(int type, Py_ssize_t kv_len, Py_ssize_t head_dim):
    """Return (keys of a block, blocks of a chunk) of a map, whose bins of keys are listed by chunk."""
    cdef Py_ssize_t block = key_block(kv_len, head_dim * FORMATS[type].real)
    return block, ix_max(1, ceil_div(ceil_div(kv_len, block), MAX_CHUNKS))


cdef int request_rows(RowRequest* w, object request, Views* at) except -1:
    w.norm, w.given = <double*> pointer(request.norm, at), pointer(request.given, at)
    w.entropy, w.max = pointer(request.entropy, at), pointer(request.max, at)
    w.position, w.distance = pointer(request.mean_position, at), pointer(request.mean_distance, at)
    w.top, w.top_keys, w.k = pointer(request.top, at), <int64_t*> pointer(request.top_keys, at), request.k
    w.sums = w.entropy != NULL or w.position != NULL or w.distance != NULL
    w.any = 1
    return 0


cdef int request_keys(KeyRequest* w, object request, Views* at) except -1:
    w.norm, w.given = <double*> pointer(request.norm, at), pointer(request.given, at)
    w.row_weights, w.order = pointer(request.row_weights, at), <int64_t*> pointer(request.order, at)
    w.walk = request.walk
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
