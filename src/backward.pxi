# Gradients, and products with the relevance: which blocks of rows and keys a task takes.
#
# One pass over a kv head takes five products per block of rows and keys, all on one thread. Two passes, over the rows
# and over the keys, take seven, and have a task per block. Both sum in the same order: blocks count from row 0 and
# key 0, and their sizes follow from depths, rows and dtype alone (rule 21 of the semantics), so the choice may depend
# on heads and threads.

cdef enum:
    GRADIENT_ROWS = 96             # rows of a block, each of which reads and writes dK and dV (48, 192: 4 % slower)
    GRADIENT_BYTES = 768 * 1024    # a block's packed keys and values, dK and dV (384 K: 8 % slower at head_dim 128)
    MAX_GRADIENT_KEYS = 256
    ROW_BLOCKS = 4                 # blocks of rows that share a task's packed keys in the pass over rows


cdef int open_gradients(Call* call, Gradients* g, object grad_output, object output, object grad_lse, object delta,
                        object query, object key, object value, object bias, object relative, object relative_key,
                        object relative_query, int relevance, object row_factors, object key_factors,
                        Views* views) except -1:
    """Open the inputs and the wanted gradients, or the X of products with the relevance."""
    memset(g, 0, sizeof(Gradients))
    call.gradients = g
    take(views, grad_output, &g.grad_out, ALL_AXES)
    take(views, output, &g.output, ALL_AXES)
    take(views, grad_lse, &g.grad_lse, HEAD | ROW)
    take(views, delta, &g.delta, HEAD | ROW, True)
    take(views, query, &g.query, ALL_AXES, True)
    take(views, key, &g.key, ALL_AXES, True)
    take(views, value, &g.value, ALL_AXES, True)
    take(views, bias, &g.bias, ALL_AXES, True)
    take(views, relative, &g.relative, ALL_AXES, True)
    take(views, relative_key, &g.relative_key, ALL_AXES, True)
    take(views, relative_query, &g.relative_query, ALL_AXES, True)
    g.relevance = relevance
    if relevance:
        take(views, row_factors, &g.row_factors, ALL_AXES)
        take(views, key_factors, &g.key_factors, ALL_AXES)
        factors = row_factors if key_factors is None else key_factors
        g.factor_dim = factors.shape[factors.ndim - 1]
    else:
        g.key_factors, g.factor_dim = call.p.key, call.p.head_dim
    return 0


cdef void divide_backward(Call* call) noexcept nogil:
    """Set block sizes and lay out the scratch."""
    cdef Params* p = &call.p
    cdef Gradients* g = call.gradients
    cdef const Format* f = call.format
    cdef Py_ssize_t heads = p.batches * p.kv_heads, key_bytes
    cdef Task task
    cdef GradientScratch scratch
    p.depth_stride = round_up(p.head_dim, f.lanes)
    g.stride = p.depth_stride + f.lanes
    g.value_stride = round_up(g.value_dim, f.lanes) + f.lanes
    g.factor_stride = round_up(g.factor_dim, f.lanes) + f.lanes
    key_bytes = (g.stride + 2 * g.factor_stride + 2 * g.value_stride) * f.real
    p.block_k = MAX_GRADIENT_KEYS
    while p.block_k > SIZES.min_block_k and p.block_k * key_bytes > GRADIENT_BYTES:
        p.block_k //= 2
    p.k_blocks = p.split_k = ceil_div(p.kv_len, p.block_k)
    p.splits = p.shared = 1
    p.block_q = ix_min(GRADIENT_ROWS, round_up(p.rows, GROUP_ROWS))
    p.q_blocks = ceil_div(p.rows, p.block_q)
    p.width = ix_min(p.block_k, round_up(p.kv_len, f.panel)) + f.lanes
    measure_key_products(p)
    g.accumulators = ix_min(p.q_blocks, ix_max(1, ix_min(ROW_BLOCKS, p.q_blocks * heads // (4 * p.n_threads))))
    if one_pass(call):
        g.accumulators = p.q_blocks
    g.row_tasks = ceil_div(p.q_blocks, g.accumulators)
    g.base = carve_task(p, f, <char*> &task, &task)
    p.scratch_bytes = g.base + carve_gradients(p, g, f, <char*> &scratch, &scratch)
    call.heads = heads
    call.bytes = g.tables = padded(p.scratch_bytes * p.n_threads)
    if has_table_terms(call):
        call.bytes += tables_of_call(p) * table_rows_bytes(p, g, f)
    if g.relevance:         # whose progress is told
        call.total = heads * (g.row_tasks if g.query.data != NULL else p.k_blocks)
    g.products = p[0]
    g.products.key, g.products.head_dim, g.products.masked, g.products.relative_index = p.value, g.value_dim, 0, NULL
    g.products.relative_key.data = g.products.relative_query.data = NULL


cdef bint one_pass(const Call* call) noexcept nogil:
    """Whether five products per head, each head on one thread, take less time than seven on all threads."""
    cdef const Params* p = &call.p
    cdef const Gradients* g = call.gradients
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    return (g.query.data != NULL and (g.key.data != NULL or g.value.data != NULL)
            and 5 * round_up(heads, p.n_threads) <= 7 * heads)


cdef void compute_backward(Call* call) noexcept nogil:
    cdef Params* p = &call.p
    cdef Gradients* g = call.gradients
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    if g.delta.data != NULL:
        run(call, deltas_step, heads * p.q_blocks)
    if has_table_terms(call):
        run(call, copy_table_step, tables_of_call(p))
    if one_pass(call):
        run(call, heads_step, heads)
    else:
        if wanted_of_tables(g):
            run(call, tables_of_head_step, heads)
        if g.query.data != NULL:
            run(call, rows_of_head_step, heads * g.row_tasks)
        if g.key.data != NULL or g.value.data != NULL:
            run(call, keys_of_head_step, heads * p.k_blocks)
    if g.bias.data != NULL:
        # Query heads that share a bias may reach the same row of it from two blocks.
        g.bias_rows = p.q_blocks if g.bias.row != 0 and (p.heads_per_kv == 1 or g.bias.head != 0) else 1
        g.bias_keys = p.k_blocks if g.bias_rows == 1 and g.bias.col != 0 else 1
        add_to_bias(call)
    if g.relative.data != NULL:                            # its rows overlap
        g.bias, g.bias_rows, g.bias_keys = g.relative, 1, 1
        add_to_bias(call)


cdef void add_to_bias(Call* call) noexcept nogil:
    cdef Gradients* g = call.gradients
    g.bias_heads = call.p.kv_heads if g.bias.head != 0 else 1
    run(call, bias_step, call.p.batches * g.bias_heads * g.bias_rows * g.bias_keys)


cdef bint has_table_terms(const Call* call) noexcept nogil:
    return call.p.relative_index != NULL and not call.gradients.relevance


cdef int wanted_of_tables(const Gradients* g) noexcept nogil:
    return WANT_TABLES if g.relative_key.data != NULL or g.relative_query.data != NULL else 0


cdef int wanted_of_keys(const Gradients* g) noexcept nogil:
    return (WANT_KEY if g.key.data != NULL else 0) | (WANT_VALUE if g.value.data != NULL else 0)


cdef void deltas_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    open_task(&call.p, t, i // call.p.q_blocks, i % call.p.q_blocks, 0)
    call.kernels.deltas(call, t)


cdef void heads_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    """A whole kv head in one pass."""
    call.kernels.gradients(call, t, i, Range(0, call.p.q_blocks), Range(0, call.p.k_blocks),
                           WANT_QUERY | wanted_of_keys(call.gradients) | wanted_of_tables(call.gradients))


cdef void tables_of_head_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    """The gradients of the tables of a kv head, whose sums are over all its rows and keys."""
    call.kernels.gradients(call, t, i, Range(0, call.p.q_blocks), Range(0, call.p.k_blocks), WANT_TABLES)


cdef void copy_table_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    call.kernels.copy_table(call, i)


cdef void rows_of_head_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    """A few blocks of rows against all keys; the last come first, because causal ones are longest."""
    cdef Py_ssize_t tasks = call.gradients.row_tasks, blocks = call.gradients.accumulators
    cdef Py_ssize_t head = i // tasks, task = i % tasks, first
    cdef Range rows
    if has_few_tasks(call, tasks):
        head, task = i % call.heads, i // call.heads
    first = (tasks - 1 - task) * blocks
    rows = Range(first, ix_min(first + blocks, call.p.q_blocks))
    call.kernels.gradients(call, t, head, rows, Range(0, call.p.k_blocks), WANT_QUERY)


cdef void keys_of_head_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    """A block of keys against all rows; the first ones first: causal ones are longest."""
    cdef Py_ssize_t head = i // call.p.k_blocks, block = i % call.p.k_blocks
    if has_few_tasks(call, call.p.k_blocks):
        head, block = i % call.heads, i // call.heads
    call.kernels.gradients(call, t, head, Range(0, call.p.q_blocks), Range(block, block + 1),
                           wanted_of_keys(call.gradients))


cdef void bias_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    """Add to bias elements that no other task has, over all heads and batch elements that share them, in order."""
    cdef Params* p = &call.p
    cdef Gradients* g = call.gradients
    cdef Py_ssize_t key_block = i % g.bias_keys, row_block = i // g.bias_keys % g.bias_rows
    cdef Py_ssize_t head = i // (g.bias_keys * g.bias_rows) % g.bias_heads
    cdef Py_ssize_t first = i // (g.bias_keys * g.bias_rows * g.bias_heads), batch, h, sharing
    cdef Range rows = Range(0, p.q_blocks) if g.bias_rows == 1 else Range(row_block, row_block + 1)
    cdef Range keys = Range(0, p.k_blocks) if g.bias_keys == 1 else Range(key_block, key_block + 1)
    cdef Range heads = Range(0, p.kv_heads) if g.bias_heads == 1 else Range(head, head + 1)
    sharing = batches_sharing(&g.bias, &p.batch, first)
    batch = first
    while sharing > 0 and not p.stop:
        if batch_offset(&g.bias, &p.batch, batch) == batch_offset(&g.bias, &p.batch, first):
            sharing -= 1
            for h in range(heads.start, heads.stop):
                call.kernels.gradients(call, t, batch * p.kv_heads + h, rows, keys, WANT_BIAS)
        batch += 1


cdef Py_ssize_t batches_sharing(const Array* a, const Batch* batch, Py_ssize_t b) noexcept nogil:
    """Number of batch elements that share b's part of a, or 0 if b is not the first of them."""
    cdef Py_ssize_t d, k = a.n_batch - 1, sharing = 1
    for d in range(batch.n - 1, -1, -1):
        if k < 0 or a.shape[k] == 1:
            if b % batch.shape[d] != 0:
                return 0
            sharing *= batch.shape[d]
        b //= batch.shape[d]
        k -= 1
    return sharing
