# The loops of the gradients: tasks over threads, blocks of keys in a task, blocks of rows against a block of keys.
#
# One pass over a kv head needs five products for a block of rows and of keys and keeps one thread busy. Two passes, one
# for the rows and one for the keys, need seven and have as many tasks as there are blocks. The sums are the same, in
# the same order: the blocks count from row 0 and key 0, and their sizes follow from depths, rows and dtype alone
# (rule 21 of the semantics), so which it is may depend on heads and threads.

cdef extern from "gradients.h" nogil:
    enum: WANT_QUERY, WANT_KEY, WANT_VALUE, WANT_BIAS

    ctypedef struct Backward:
        Array grad_out, output, grad_lse, delta
        Array query, key, value, bias
        Params products
        Py_ssize_t value_dim, stride, value_stride, accumulators, base

    ctypedef struct Sweep:
        void* query
        void* grad_out
        const void** grad_rows
        unsigned char* odd
        int any_odd
        void* delta
        void* weights
        void* scores
        void* slopes
        Packed keys
        Packed values
        void* key_rows
        void* d_query
        void* d_key
        void* d_value
        Range* part
        Range* span

cdef extern from "tiles.h" nogil:
    ctypedef struct BackwardTile:
        void (*deltas)(const Params*, const Backward*, Task*, Sweep*) noexcept nogil
        void (*load)(const Params*, const Backward*, Task*, Sweep*) noexcept nogil
        void (*pack)(const Params*, const Backward*, Task*, Py_ssize_t, Sweep*) noexcept nogil
        void (*cap_slopes)(const Params*, const Task*, Py_ssize_t, Sweep*) noexcept nogil
        void (*score_gradients)(const Params*, const Task*, Py_ssize_t, Py_ssize_t, int, Sweep*) noexcept nogil
        void (*clear_unseen)(const Params*, const Task*, Py_ssize_t, Py_ssize_t, Sweep*) noexcept nogil
        void (*add_query)(const Params*, const Backward*, const Task*, Py_ssize_t, Py_ssize_t, void*,
                          Sweep*) noexcept nogil
        void (*add_keys)(const Params*, const Backward*, Task*, Py_ssize_t, int, Sweep*) noexcept nogil
        void (*add_bias)(const Params*, const Backward*, const Task*, Py_ssize_t, Py_ssize_t, Py_ssize_t,
                         Sweep*) noexcept nogil
        void (*store_query)(const Params*, const Backward*, const Task*, void*) noexcept nogil
        void (*store_keys)(const Params*, const Backward*, const Task*, Py_ssize_t, int, Sweep*) noexcept nogil

    const BackwardTile BACKWARD_TILES[2]

cdef enum:
    GRADIENT_ROWS = 96             # rows of a block: so often sums of keys move (48, 192: 4 % slower)
    GRADIENT_BYTES = 768 * 1024    # of keys and values of a block, packed and as sums (384 K: 8 % slower at D = 128)
    MOST_GRADIENT_KEYS = 256
    ROW_BLOCKS = 4                 # blocks of rows for which a task of the pass over rows packs its keys
    EXTRA = 8                      # arrays of a call for gradients beside those of AXES

cdef int[EXTRA] EXTRA_AXES = [HEAD | ROW | COL, HEAD | ROW | COL, HEAD | ROW, HEAD | ROW, HEAD | ROW | COL,
                              HEAD | ROW | COL, HEAD | ROW | COL, HEAD | ROW | COL]
cdef enum:
    EXTRA_OUTPUTS = 3              # from here on they are written


cdef struct BackwardWork:
    Work work                      # first: the steps get a pointer to it
    Backward grads
    Py_ssize_t row_tasks           # tasks of the pass over rows for each head
    Py_ssize_t bias_rows, bias_keys, bias_heads     # blocks and heads that have their own elements of the bias


def backward(tuple arrays, tuple extra, tuple batch, tuple sizes, tuple options, int threads, bint explicit, norm=None):
    """Gradients of attention under the lse in `arrays`, which are otherwise those of `attention` without results.

    The extra arrays are grad_output, output, grad_lse, delta (of each row, written), and the gradients of query, key,
    value (written) and bias (added to); those that are None are not computed. `norm` (wants.h) replaces the lse of rows
    whose inverse sum in it is above 0.
    """
    cdef BackwardWork work
    cdef Work* w = &work.work
    cdef Backward* g = &work.grads
    cdef Params* p = &w.p
    cdef Py_ssize_t shape[64]
    cdef Views views
    cdef Views more
    cdef Pointers pointers
    cdef int i
    cdef Array** extras = [&g.grad_out, &g.output, &g.grad_lse, &g.delta, &g.query, &g.key, &g.value, &g.bias]
    memset(&work, 0, sizeof(BackwardWork))
    memset(&views.held, 0, sizeof(views.held))
    memset(&more.held, 0, sizeof(more.held))
    pointers.held = 0
    try:
        open_call(w, BACKWARD, arrays, batch, sizes, options, shape, &views)
        for i in range(EXTRA):
            more.held[i] = take(extra[i], extras[i], &more.view[i], EXTRA_AXES[i], i >= EXTRA_OUTPUTS)
        p.key_wants.norm = <double*> pointer(norm, &pointers)
        prepare(w, BACKWARD)
        g.value_dim, p.value_dim = p.value_dim, 0          # the forward pass has nothing to do with values
        start(w, divide_backward, compute_backward, threads, explicit)
        return plan_of(w)
    finally:
        close_arrays(&views)
        close_arrays(&more)
        if pointers.held:
            PyBuffer_Release(&pointers.view[0])


cdef void divide_backward(Work* w) noexcept nogil:
    """Block sizes, and the parts of the scratch memory."""
    cdef Params* p = &w.p
    cdef Backward* g = &(<BackwardWork*> w).grads
    cdef Py_ssize_t real = w.tile.real, heads = p.batches * p.kv_heads
    cdef Task task
    cdef Sweep sweep
    p.depth_stride = round_up(p.head_dim, w.tile.lanes)
    g.stride = p.depth_stride + w.tile.lanes
    g.value_stride = round_up(g.value_dim, w.tile.lanes) + w.tile.lanes
    p.block_k = MOST_GRADIENT_KEYS
    while p.block_k > SIZES.least_block_k and p.block_k * (3 * g.stride + 2 * g.value_stride) * real > GRADIENT_BYTES:
        p.block_k //= 2
    p.k_blocks = p.split_k = ceil_div(p.kv_len, p.block_k)
    p.splits = p.shared = 1
    p.block_q = least(GRADIENT_ROWS, round_up(p.rows, GROUP_ROWS))
    p.q_blocks = ceil_div(p.rows, p.block_q)
    p.width = least(p.block_k, round_up(p.kv_len, w.tile.panel)) + w.tile.lanes
    g.accumulators = least(p.q_blocks, most(1, least(ROW_BLOCKS, p.q_blocks * heads // (4 * p.n_threads))))
    if one_pass(w):
        g.accumulators = p.q_blocks
    (<BackwardWork*> w).row_tasks = ceil_div(p.q_blocks, g.accumulators)
    g.base = lay_out(w, <char*> &task, &task)              # to count
    p.scratch_bytes = g.base + lay_out_sweep(w, <char*> &sweep, &sweep)
    w.heads = heads
    w.bytes = p.scratch_bytes * p.n_threads
    g.products = p[0]
    g.products.key, g.products.head_dim, g.products.arrays = p.value, g.value_dim, 0


cdef bint one_pass(const Work* w) noexcept nogil:
    """Whether five products a head, on as many threads as there are heads, take less than seven on all threads."""
    cdef const Params* p = &w.p
    cdef const Backward* g = &(<const BackwardWork*> w).grads
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    return (g.query.data != NULL and (g.key.data != NULL or g.value.data != NULL)
            and 5 * round_up(heads, p.n_threads) <= 7 * heads)


cdef Py_ssize_t lay_out_sweep(const Work* w, char* scratch, Sweep* b) noexcept nogil:
    """Give b its places in the scratch; returns the bytes."""
    cdef const Params* p = &w.p
    cdef const Backward* g = &(<const BackwardWork*> w).grads
    cdef Py_ssize_t real = w.tile.real, rows = p.block_q, keys = p.width
    cdef char* at = scratch
    b.query = cut(&at, rows * g.stride * real)
    b.grad_out = cut(&at, rows * g.value_stride * real)
    b.grad_rows = <const void**> cut(&at, rows * sizeof(void*))
    b.odd = <unsigned char*> cut(&at, rows)
    b.delta = cut(&at, rows * real)
    b.weights = cut(&at, rows * p.width * real)
    b.scores = cut(&at, rows * p.width * real)
    b.slopes = cut(&at, GROUP_ROWS * p.width * real if p.softcap != 0 else 0)
    b.keys.keys = cut(&at, keys * p.head_dim * real)
    b.values.keys = cut(&at, keys * g.value_dim * real)
    b.keys.values = b.values.values = NULL      # both are panels of keys
    b.key_rows = cut(&at, keys * g.stride * real)
    b.d_query = cut(&at, g.accumulators * rows * g.stride * real if g.query.data != NULL else 0)
    b.d_key = cut(&at, keys * g.stride * real)
    b.d_value = cut(&at, keys * g.value_stride * real)
    b.part = <Range*> cut(&at, rows * sizeof(Range))
    b.span = <Range*> cut(&at, keys * sizeof(Range))
    return padded(at - scratch)


cdef void compute_backward(Work* w) noexcept nogil:
    cdef Params* p = &w.p
    cdef BackwardWork* x = <BackwardWork*> w
    cdef Backward* g = &x.grads
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    w.scratch = w.memory
    w.next_poll = seconds() + 0.05
    run(w, deltas_step, heads * p.q_blocks)
    if one_pass(w):
        run(w, heads_step, heads)
    else:
        if g.query.data != NULL:
            run(w, rows_of_head_step, heads * x.row_tasks)
        if g.key.data != NULL or g.value.data != NULL:
            run(w, keys_of_head_step, heads * p.k_blocks)
    if g.bias.data != NULL:
        x.bias_heads = p.kv_heads if g.bias.head != 0 else 1
        # Query heads of a group that share a bias may meet the same row of it in two blocks.
        x.bias_rows = p.q_blocks if g.bias.row != 0 and (p.group == 1 or g.bias.head != 0) else 1
        x.bias_keys = p.k_blocks if x.bias_rows == 1 and g.bias.col != 0 else 1
        run(w, bias_step, p.batches * x.bias_heads * x.bias_rows * x.bias_keys)


cdef int wanted_of_keys(Work* w) noexcept nogil:
    cdef Backward* g = &(<BackwardWork*> w).grads
    return (WANT_KEY if g.key.data != NULL else 0) | (WANT_VALUE if g.value.data != NULL else 0)


cdef void deltas_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    cdef Sweep b
    lay_out_sweep(w, sweep_memory(w, thread), &b)
    open_task(w, t, i // w.p.q_blocks, i % w.p.q_blocks, 0)
    BACKWARD_TILES[w.p.type].deltas(&w.p, &(<BackwardWork*> w).grads, t, &b)


cdef void heads_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    """A whole kv head in one pass."""
    pass_over(w, t, thread, i, Range(0, w.p.q_blocks), Range(0, w.p.k_blocks), WANT_QUERY | wanted_of_keys(w))


cdef void rows_of_head_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    """A few blocks of rows against all keys; the last ones first: causal ones are longest."""
    cdef Py_ssize_t tasks = (<BackwardWork*> w).row_tasks, blocks = (<BackwardWork*> w).grads.accumulators
    cdef Py_ssize_t first = (tasks - 1 - i % tasks) * blocks
    cdef Range rows = Range(first, least(first + blocks, w.p.q_blocks))
    pass_over(w, t, thread, i // tasks, rows, Range(0, w.p.k_blocks), WANT_QUERY)


cdef void keys_of_head_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    """A block of keys against all rows."""
    cdef Py_ssize_t block = i % w.p.k_blocks
    cdef Range keys = Range(block, block + 1)
    pass_over(w, t, thread, i // w.p.k_blocks, Range(0, w.p.q_blocks), keys, wanted_of_keys(w))


cdef void bias_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    """Elements of the bias that no other task has, and in order all heads and batch elements that share them."""
    cdef Params* p = &w.p
    cdef BackwardWork* x = <BackwardWork*> w
    cdef Array* bias = &x.grads.bias
    cdef Py_ssize_t key_block = i % x.bias_keys, row_block = i // x.bias_keys % x.bias_rows
    cdef Py_ssize_t head = i // (x.bias_keys * x.bias_rows) % x.bias_heads
    cdef Py_ssize_t first = i // (x.bias_keys * x.bias_rows * x.bias_heads), batch, h, sharing
    cdef Range rows = Range(0, p.q_blocks) if x.bias_rows == 1 else Range(row_block, row_block + 1)
    cdef Range keys = Range(0, p.k_blocks) if x.bias_keys == 1 else Range(key_block, key_block + 1)
    cdef Range heads = Range(0, p.kv_heads) if x.bias_heads == 1 else Range(head, head + 1)
    sharing = batches_sharing(bias, &p.batch, first)
    batch = first
    while sharing > 0 and not p.stop:
        if batch_offset(bias, &p.batch, batch) == batch_offset(bias, &p.batch, first):
            sharing -= 1
            for h in range(heads.start, heads.stop):
                pass_over(w, t, thread, batch * p.kv_heads + h, rows, keys, WANT_BIAS)
        batch += 1


cdef Py_ssize_t batches_sharing(const Array* a, const Batch* batch, Py_ssize_t b) noexcept nogil:
    """How many batch elements have the part of a that b has, or 0 where b is not the first of them."""
    cdef Py_ssize_t d, k = a.n_batch - 1, sharing = 1
    for d in range(batch.n - 1, -1, -1):
        if k < 0 or a.shape[k] == 1:
            if b % batch.shape[d] != 0:
                return 0
            sharing *= batch.shape[d]
        b //= batch.shape[d]
        k -= 1
    return sharing


cdef char* sweep_memory(Work* w, int thread) noexcept nogil:
    return w.scratch + thread * w.p.scratch_bytes + (<BackwardWork*> w).grads.base


cdef void pass_over(Work* w, Task* t, int thread, Py_ssize_t head, Range rows, Range keys, int want) noexcept nogil:
    """The gradients `want` of blocks of rows and blocks of keys of a kv head."""
    cdef Params* p = &w.p
    cdef Backward* g = &(<BackwardWork*> w).grads
    cdef const BackwardTile* tile = &BACKWARD_TILES[p.type]
    cdef Py_ssize_t block, i, real = w.tile.real
    cdef bint packed
    cdef Sweep b
    lay_out_sweep(w, sweep_memory(w, thread), &b)
    if want & WANT_QUERY:
        memset(b.d_query, 0, (rows.stop - rows.start) * p.block_q * g.stride * real)
    for block in range(keys.start, keys.stop):
        memset(b.d_key, 0, p.width * g.stride * real)
        memset(b.d_value, 0, p.width * g.value_stride * real)
        packed = False
        for i in range(rows.start, rows.stop):
            open_task(w, t, head, i, 0)
            if not t.block_start <= block < t.block_stop:
                continue
            if not packed:
                tile.pack(p, g, t, block, &b)
                packed = True
            meet(w, t, block, want, &b, <char*> b.d_query + (i - rows.start) * p.block_q * g.stride * real)
            if p.stop:
                return
            poll(w, thread)
        if want & (WANT_KEY | WANT_VALUE):
            open_head(w, t, head)
            tile.store_keys(p, g, t, block, want, &b)
    if want & WANT_QUERY:
        for i in range(rows.start, rows.stop):
            open_task(w, t, head, i, 0)
            tile.store_query(p, g, t, <char*> b.d_query + (i - rows.start) * p.block_q * g.stride * real)


cdef void meet(Work* w, Task* t, Py_ssize_t block, int want, Sweep* b, void* d_query) noexcept nogil:
    """The algorithm for a block of rows and a block of keys, one line a step."""
    cdef Params* p = &w.p
    cdef Backward* g = &(<BackwardWork*> w).grads
    cdef const BackwardTile* tile = &BACKWARD_TILES[p.type]
    cdef Py_ssize_t k, r, n
    cdef bint capped = p.softcap != 0 and want != WANT_BIAS
    cdef bint any_seen = False
    tile.load(p, g, t, b)
    w.tile.load_lse(p, t)
    for k in range(ceil_div(t.rows, GROUP_ROWS)):
        r = k * GROUP_ROWS
        n = least(GROUP_ROWS, t.rows - r)
        if weigh_group(w, t, r, n, block, want, capped, b):
            any_seen = True
            tile.score_gradients(p, t, r, n, capped, b)
            if want & WANT_BIAS:
                tile.add_bias(p, g, t, r, n, block, b)
            if want & WANT_QUERY:
                tile.add_query(p, g, t, r, n, d_query, b)
        tile.clear_unseen(p, t, r, n, b)
        b.part[k] = Range(t.column, t.columns)
    if any_seen and want & (WANT_KEY | WANT_VALUE):
        tile.add_keys(p, g, t, block, want, b)


cdef bint weigh_group(Work* w, Task* t, Py_ssize_t r, Py_ssize_t n, Py_ssize_t block, int want, bint capped,
                      Sweep* b) noexcept nogil:
    """Scores of a group, and the products of grad_out and value; whether the group sees a key of the block."""
    cdef const Tile* tile = w.tile
    cdef Params* p = &w.p
    cdef Py_ssize_t at = r * p.width * tile.real
    cdef Task products
    cdef int seen = tile.classify(p, t, r, n, block)
    if seen == SKIP:
        return False
    t.s = <char*> b.weights + at
    tile.scores(p, t, r, n, b.keys)
    if capped:
        BACKWARD_TILES[p.type].cap_slopes(p, t, n, b)
    if not p.plain or seen == PARTIAL:
        tile.finish_scores(p, t, r, n)
    if want != WANT_VALUE:
        products = t[0]
        products.s, products.q_rows = <char*> b.scores + at, b.grad_rows
        tile.scores(&(<BackwardWork*> w).grads.products, &products, r, n, b.values)
    return True
