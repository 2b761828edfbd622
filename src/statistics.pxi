# Statistics of the weights. Those of rows are taken beside the softmax (forward.pxi). Those of keys are sums over rows
# whose norm is known: a task owns a range of keys of one kv head and walks the rows in order, so that nothing is added
# between threads.

cdef enum:
    ROWS, KEYS, PLACES             # parts of `statistics`
    WANTS = 20
    MOST_KEY_BLOCK = 512
    LEAST_KEY_BLOCK = 128          # where keys are few, so that several threads have some
    KEY_BLOCK_BYTES = 256 * 1024
    MOST_CHUNKS = 32               # of keys in a map: each keeps sums of its own for every bin of rows
    WALK_ROWS = 192                # opened at a time
    HEAP_BYTES = 512 * 1024        # of the largest scores of a task's rows
    BIN_BYTES = 16 * 1024 * 1024   # of a round's parts of maps


cdef Py_ssize_t heap_rows(const Work* w) noexcept nogil:
    """How many rows a task may have if it keeps the largest scores of each."""
    cdef Py_ssize_t row = w.p.row_wants.k * (w.tile.real + 4)
    return most(1, HEAP_BYTES // most(row, 1) // GROUP_ROWS) * GROUP_ROWS


cdef void lay_out_seen(const Work* w, char** at, Task* t) noexcept nogil:
    """The scratch of statistics."""
    cdef const RowWants* r = &w.p.row_wants
    cdef const KeyWants* k = &w.p.key_wants
    cdef Py_ssize_t real = w.tile.real, rows = w.p.block_q if r.sums else 0, keys = w.p.width if w.mode == RECEIVE else 0
    t.seen.surprise = <double*> cut(at, rows * 8)
    t.seen.position = <double*> cut(at, rows * 8)
    t.seen.distance = <double*> cut(at, rows * 8)
    t.seen.scores = cut(at, GROUP_ROWS * w.p.width * real if r.sums else 0)
    t.seen.heap = cut(at, w.p.block_q * r.k * real)
    t.seen.heap_keys = <int*> cut(at, w.p.block_q * r.k * 4)
    t.seen.mass = <double*> cut(at, keys * 8)
    t.seen.bin = <double*> cut(at, keys * 8)
    t.seen.seen = <double*> cut(at, keys * 8)
    t.seen.hits = <int64_t*> cut(at, keys * 8)
    t.seen.products = <double*> cut(at, keys * k.columns * 8)
    t.seen.odd = <unsigned char*> cut(at, GROUP_ROWS * keys)
    t.seen.largest = cut(at, keys * real)
    t.seen.part = cut(at, keys * real)
    t.seen.merged = <double*> cut(at, k.key_bins * 8 if k.map != NULL else 0)


cdef Py_ssize_t key_block(Py_ssize_t kv_len, Py_ssize_t row_bytes) noexcept nogil:
    """Keys that are packed at once: the sums of a map are added in their order, so it follows from the sizes alone."""
    cdef Py_ssize_t block = MOST_KEY_BLOCK
    while block > LEAST_KEY_BLOCK and (block * row_bytes > KEY_BLOCK_BYTES or block * 4 > kv_len):
        block //= 2
    return block


cdef void divide_keys(Work* w) noexcept nogil:
    cdef Params* p = &w.p
    cdef KeyWants* k = &p.key_wants
    cdef Py_ssize_t heads = p.batches * p.kv_heads, per_head = 0
    cdef Task unused
    p.value_stride = p.keep = p.shared = 0
    p.whole = p.splits = 1
    p.depth_stride = round_up(p.head_dim, w.tile.lanes)
    p.copied = queries_copied(p, w.tile)
    p.block_k = key_block(p.kv_len, p.head_dim * w.tile.real)
    p.split_k = p.k_blocks = ceil_div(p.kv_len, p.block_k)
    p.width = least(p.block_k, round_up(p.kv_len, w.tile.panel))
    p.pack_bytes = packed_bytes(w)
    p.block_q = WALK_ROWS
    p.scratch_bytes = lay_out(w, <char*> &unused, &unused)
    w.chunk = ceil_div(p.k_blocks, MOST_CHUNKS) if k.map != NULL else 1
    w.chunks = ceil_div(p.k_blocks, w.chunk)
    w.heads = heads
    if k.map != NULL:
        per_head = p.group * k.row_bins * k.slot_start[w.chunks] * 8
        w.heads = least(heads, most(1, BIN_BYTES // most(per_head, 1)))
    w.bytes = p.scratch_bytes * p.n_threads + per_head * w.heads
    w.total = heads * (w.chunks + (1 if k.map != NULL else 0))


cdef void receive_all(Work* w) noexcept nogil:
    """All rounds of kv heads; a round holds as many as fit the memory for parts of maps."""
    cdef Params* p = &w.p
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    w.scratch = w.memory
    w.bins = <double*> (w.scratch + p.scratch_bytes * p.n_threads)
    w.next_poll = seconds() + 0.05
    w.first_head = 0
    while w.first_head < heads and not p.stop:
        w.heads = least(w.heads, heads - w.first_head)
        run(w, receive_step, w.heads * w.chunks)
        if p.key_wants.map != NULL:
            run(w, bins_step, w.heads)
        w.first_head += w.heads


cdef double* bins_of(Work* w, Py_ssize_t head, Py_ssize_t member) noexcept nogil:
    """The parts of the map of a query head of this round."""
    cdef KeyWants* k = &w.p.key_wants
    return w.bins + (head * w.p.group + member) * k.row_bins * k.slot_start[w.chunks]


cdef void receive_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    """One chunk of the keys of a kv head, against all rows of its query heads."""
    cdef Params* p = &w.p
    cdef Py_ssize_t chunk = i % w.chunks, block, member
    open_head(w, t, w.first_head + i // w.chunks)
    open_arrays_of(w, t)
    for block in range(chunk * w.chunk, least(p.k_blocks, (chunk + 1) * w.chunk)):
        if block * p.block_k < t.lengths.kv_length:
            w.tile.pack(p, t, block, t.packed)
        for member in range(p.group):
            if p.key_wants.map != NULL:
                open_bins(w, t, i // w.chunks, member, chunk, block == chunk * w.chunk)
            receive_head(w, t, block, t.kv_head * p.group + member, thread)


cdef void open_bins(Work* w, Task* t, Py_ssize_t head, Py_ssize_t member, Py_ssize_t chunk, bint fresh) noexcept nogil:
    """The chunk's part of the map of a query head of this round."""
    cdef const KeyWants* k = &w.p.key_wants
    t.seen.slots = k.slot_start[chunk + 1] - k.slot_start[chunk]
    t.seen.bins = bins_of(w, head, member) + k.slot_start[chunk] * k.row_bins
    if fresh:
        memset(t.seen.bins, 0, k.row_bins * t.seen.slots * sizeof(double))


cdef void receive_head(Work* w, Task* t, Py_ssize_t block, Py_ssize_t head, int thread) noexcept nogil:
    """A block of keys against all rows of a query head, in their order."""
    cdef Params* p = &w.p
    cdef const KeyWants* k = &p.key_wants
    cdef Py_ssize_t part, g, r, n
    cdef int seen
    w.tile.clear_keys(p, t)
    t.seen.row_bin = -1
    for part in range(ceil_div(k.walk, p.block_q)):
        if p.stop:
            return
        if not open_walk(w, t, head, part * p.block_q, block):
            continue
        w.tile.begin(p, t)
        w.tile.load_norm(p, t)
        for g in range(ceil_div(t.rows, GROUP_ROWS)):
            r = g * GROUP_ROWS
            n = least(GROUP_ROWS, t.rows - r)
            seen = w.tile.classify(p, t, r, n, block)
            if seen != SKIP:
                scores(w, t, r, n, block, t.packed, seen)
                w.tile.receive(p, t, r, n, block)
        poll(w, thread)
    if k.map != NULL:
        w.tile.close_bin(p, t, block)
    w.tile.finish_keys(p, t, head, block)


cdef bint open_walk(Work* w, Task* t, Py_ssize_t head, Py_ssize_t first, Py_ssize_t block) noexcept nogil:
    """The next rows to walk; whether one of them may see the block by its position."""
    cdef Params* p = &w.p
    cdef const KeyWants* k = &p.key_wants
    cdef Py_ssize_t r, position, begin = block * p.block_k
    cdef bint some = False
    cdef Range keys
    t.first, t.rows = first, least(p.block_q, k.walk - first)
    for r in range(t.rows):
        position = k.order[first + r] if k.order != NULL else first + r
        keys = visible(p, t.lengths, position)
        t.row[r] = Row(keys.start, keys.stop, position, head)
        some |= keys.start < least(keys.stop, begin + p.block_k) and begin < keys.stop
    return some


cdef void bins_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    """The maps of the query heads of a kv head."""
    cdef Py_ssize_t member, bin, head = (w.first_head + i) * w.p.group
    for member in range(w.p.group):
        for bin in range(w.p.key_wants.row_bins):
            if w.p.stop:
                return
            w.tile.merge_bins(&w.p, t, bins_of(w, i, member), w.chunks, head + member, bin)
            poll(w, thread)


def key_plan(int type, Py_ssize_t kv_len, Py_ssize_t head_dim):
    """(keys of a block, blocks of a chunk) of a map: its bins of keys are listed by chunk."""
    cdef Py_ssize_t block = key_block(kv_len, head_dim * TILES[type].real)
    return block, most(1, ceil_div(ceil_div(kv_len, block), MOST_CHUNKS))


cdef struct Pointers:
    Py_buffer view[WANTS]
    int held


cdef void* pointer(object x, Pointers* pointers) except? NULL:
    """The memory of a contiguous array, or NULL for None."""
    if x is None:
        return NULL
    PyObject_GetBuffer(x, &pointers.view[pointers.held], PyBUF_STRIDES)
    pointers.held += 1
    return pointers.view[pointers.held - 1].buf


cdef int want_rows(RowWants* w, tuple wants, Pointers* at) except -1:
    norm, entropy, largest, position, distance, top, top_keys, k, given = wants
    w.norm = <double*> pointer(norm, at)
    w.entropy, w.max = pointer(entropy, at), pointer(largest, at)
    w.position, w.distance = pointer(position, at), pointer(distance, at)
    w.top, w.top_keys, w.k = pointer(top, at), <int64_t*> pointer(top_keys, at), k
    w.given = pointer(given, at)
    w.sums = w.entropy != NULL or w.position != NULL or w.distance != NULL
    w.any = 1
    return 0


cdef int want_keys(KeyWants* w, tuple wants, Pointers* at) except -1:
    (norm, given, row_weights, order, walk, mass, largest, seen, hits, threshold, map, map_max, row_bin, bin_rows, key_bins,
     slot, slot_start, slot_bin, products, factors, columns, odd_factors) = wants
    w.norm, w.given, w.row_weights = <double*> pointer(norm, at), pointer(given, at), pointer(row_weights, at)
    w.order, w.walk = <int64_t*> pointer(order, at), walk
    w.mass, w.max, w.seen = pointer(mass, at), pointer(largest, at), pointer(seen, at)
    w.hits, w.threshold = <int64_t*> pointer(hits, at), threshold
    w.map, w.map_max, w.row_bin = pointer(map, at), map_max, <int64_t*> pointer(row_bin, at)
    w.bin_rows, w.key_bins = <double*> pointer(bin_rows, at), key_bins
    w.row_bins = len(bin_rows) if bin_rows is not None else 0
    w.slot, w.slot_start = <int64_t*> pointer(slot, at), <int64_t*> pointer(slot_start, at)
    w.slot_bin = <int64_t*> pointer(slot_bin, at)
    w.products, w.factors = pointer(products, at), pointer(factors, at)
    w.columns, w.odd_factors = columns, odd_factors
    return 0


def statistics(int part, tuple arrays, tuple batch, tuple sizes, tuple options, int threads, bint explicit,
               tuple wants, progress):
    """Statistics of the weights of one call; what `attention` takes, and which of them are wanted.

    part ROWS fills statistics of rows, beside the output if that is given; KEYS those of keys; PLACES writes weights
    under a norm. `wants` has the fields of RowWants or KeyWants (wants.h) in the order of want_rows and want_keys: C-contiguous
    arrays over (batch, q_heads, rows or keys), or None. `progress` is None or a function of (done, total). Returns the
    natural score per unit of the row maxima in `norm`.
    """
    cdef Work work
    cdef Params* p = &work.p
    cdef Py_ssize_t shape[64]
    cdef Views views
    cdef Pointers pointers
    cdef int i, mode = ATTEND if part == ROWS else RECEIVE if part == KEYS else WEIGHTS
    memset(&work, 0, sizeof(Work))
    memset(&views.held, 0, sizeof(views.held))
    pointers.held = 0
    try:
        open_call(&work, mode, arrays, batch, sizes, options, shape, &views)
        work.progress = NULL if progress is None else <void*> progress
        if part == ROWS:
            if p.out.data != NULL and p.rows <= SIZES.few_rows:   # the states of few rows know no statistics: a second pass
                prepare(&work, mode)
                start(&work, divide, compute, threads, explicit)
                p.out.data = p.lse.data = p.weights.data = NULL
                p.value_dim = p.keep = 0
            want_rows(&p.row_wants, wants, &pointers)
        else:
            want_keys(&p.key_wants, wants, &pointers)
        work.uniform = True
        prepare(&work, mode)
        if part == KEYS:
            start(&work, divide_keys, receive_all, threads, explicit)
        else:
            start(&work, divide, compute, threads, explicit)
        return p.unit
    finally:
        close_arrays(&views)
        for i in range(pointers.held):
            PyBuffer_Release(&pointers.view[i])
