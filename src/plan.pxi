# How a call is divided: blocks, splits, rounds of kv heads, and the scratch they need.
#
# Rule 21 of the semantics: a row's bits may depend on the path (call/path.h) and on block_k and split_k, which count
# from key 0 and follow from depths, dtype and the number of rows of a kv head. block_q, rounds, sharing and threads
# only decide which thread computes what.

cdef enum:
    # Gap between the scratch of two threads, wider than the hardware prefetcher reaches beyond strided accesses (32 KB
    # on Zen 5): a softmax of (64, 64, 128) along axis 1 takes 69 microseconds instead of 164.
    SCRATCH_GAP = 64 * 1024
    SHARED_BYTES = 16 * 1024 * 1024  # keys and values of a round; above 32 MB the C library maps new pages each call
    # At least this for each thread: all wait for the longest task of a round. With 128 threads one round of 8 heads
    # takes 0.5 of the time of 8 rounds (f32 1,8,8192,8192,128 causal; benchmarks/many_cores.py).
    THREAD_BYTES = 1280 * 1024
    STATE_BYTES = 16 * 1024 * 1024
    # FLOP from which threads share a call. Microseconds on one thread and on two of an awake pool: 0.66 M 8.1 and 7.0,
    # 2.4 M 16.3 and 11.3, 4.7 M 29.5 and 18.2. The border is above the break-even, because a sleeping pool wakes first.
    MIN_PARALLEL_WORK = 2000000
    TASK_WORK = 4000000              # FLOP of a task of several small heads: 15 microseconds
    FEW_TASKS = 16                   # of a thread
    ROW_STATE = 64                   # bytes per row of a task beside query and sums


cdef void prepare(Call* call, int mode) noexcept nogil:
    """Set what follows from the options alone: the units of scores, the kernels and the path."""
    cdef Params* p = &call.p
    cdef double magnitude = p.scale if p.scale >= 0 else -p.scale
    p.mode = mode
    p.by_position = p.k_positions.data != NULL and (p.causal or p.left >= 0 or p.right >= 0)
    p.masked = (p.mask.data != NULL or p.block_mask.data != NULL or p.key_indices.data != NULL
                or p.key_mask.data != NULL or p.q_segments.data != NULL or p.by_position)
    p.bias_alone = (p.bias.data != NULL and p.relative.data == NULL and not p.masked and p.softcap == 0
                    and p.slopes.data == NULL)
    p.masked = p.masked or p.bias.data != NULL
    # Scales outside 1e-30..1e30 lose the exponent's precision, so they take the general path.
    p.raw_scores = (p.softcap == 0 and p.bias.data == NULL and p.slopes.data == NULL and 1e-30 < magnitude < 1e30
                    and (mode != SCORES or p.scale == 1))
    if mode == SCORES:
        p.unit, p.exponent, p.flip = 1, 1, 0
    else:
        p.flip = p.raw_scores and p.scale < 0
        p.unit = magnitude if p.raw_scores else 1
        p.exponent = p.unit * 1.4426950408889634             # log2 e
    p.pairs = multiplies_pairs(p)
    call.kernels = &KERNELS[p.type]
    call.format = &FORMATS[PAIRED if p.pairs else p.type]
    p.path = choose_path(p, call.format, &p.unfused)
    if p.unfused == PACKED:
        p.group_rows = GROUP_ROWS
    else:
        p.group_rows = round_up(p.rows, rows_of_strip(call.format)) if p.unfused == STRIPS else p.rows


cdef void divide(Call* call) noexcept nogil:
    """Set block sizes, and lay out the scratch and count its bytes."""
    cdef Params* p = &call.p
    cdef const Format* f = call.format
    cdef Py_ssize_t heads = p.batches * p.kv_heads, per_head, kept_rows = 0, round_bytes
    cdef Task unused
    set_strides(call)
    p.block_k = keys_of_block(p, f, p.unfused)
    p.k_blocks = ceil_div(p.kv_len, p.block_k)
    p.width = ix_min(p.block_k, round_up(p.kv_len, f.panel))
    if p.unfused == STRIPS:
        p.width += f.panel                 # rows a power of two apart would share sets of L1
    measure_key_products(p)
    p.pack_bytes = packed_bytes(p, f)
    p.split_k = p.k_blocks if p.rows > SIZES.few_rows or for_statistics(p) else SIZES.split_k // p.block_k
    p.splits = ix_max(1, ceil_div(p.k_blocks, p.split_k)) if p.k_blocks else 1
    p.parts = 0
    if p.rows > SIZES.few_rows:
        p.parts = parts_of_fused(p, f) if p.path == FUSED else parts_of_head(p, f)
    p.shared = p.rows > SIZES.few_rows and not p.parts
    if p.mode == ATTEND and p.weights.data != NULL and p.splits == 1 and p.k_blocks:
        # A task has few enough rows to keep their scores in L2 until the row sums are known, if two groups of rows fit.
        # With a single block of keys each group ends before the next one begins: one part, in L1.
        kept_rows = share_of_l2(SIZES.keep_share) // (p.k_blocks * p.width * f.real) // GROUP_ROWS * GROUP_ROWS
        if p.k_blocks == 1:
            p.kept_scores, kept_rows = 1, p.rows
        elif kept_rows >= (p.rows if p.rows <= SIZES.few_rows else 2 * GROUP_ROWS):
            p.kept_scores = 1
            if kept_rows < p.rows:
                p.parts, p.shared = 0, 1
    p.block_q = rows_of_task(call)
    if p.kept_scores and p.k_blocks > 1:
        p.block_q = ix_min(p.block_q, kept_rows)
    if rows_of_heap(call) < p.block_q:
        p.block_q = rows_of_heap(call)
        if p.parts:
            p.parts, p.shared = 0, 1

    per_head = p.k_blocks * p.pack_bytes
    call.heads = heads
    round_bytes = ix_max(SHARED_BYTES, p.n_threads * THREAD_BYTES)
    if p.shared and per_head * heads > round_bytes:             # in rounds of the same number of heads
        call.heads = ceil_div(heads, ceil_div(heads, ix_max(1, round_bytes // per_head)))
    balance_blocks(call)
    if p.kept_scores and p.k_blocks > 1:
        p.kept_scores = ceil_div(p.block_q, p.group_rows) * p.k_blocks
    p.scratch_bytes = carve_task(p, f, <char*> &unused, &unused) + (SCRATCH_GAP if p.n_threads > 1 else 0)
    call.round_splits = p.splits
    call.total = heads * p.q_blocks * p.splits + (2 * heads * p.k_blocks if p.shared else 0)
    p.state_bytes = 0
    if p.splits > 1 and p.mode in (ATTEND, WEIGHTED_SUM):
        p.state_bytes = padded((2 * p.value_stride + f.lanes) * f.real + 8)
        call.heads = ix_min(heads, ix_max(1, STATE_BYTES // (p.rows * p.state_bytes * (p.splits + 1))))
        call.round_splits = ix_min(p.splits, ix_max(p.n_threads, STATE_BYTES // (p.rows * p.state_bytes)))
    p.next_head = 1 if heads_of_task(p) > 1 else <int> ix_max(1, p.n_threads // p.q_blocks)
    call.bytes = p.scratch_bytes * p.n_threads
    call.bytes += per_head * call.heads if p.shared else 0
    call.bytes += p.state_bytes * p.rows * call.heads * (call.round_splits + 1)
    if p.mode == ATTEND and p.weights.data != NULL and not p.kept_scores:
        call.bytes += padded(16 * p.rows * heads)


cdef void set_strides(Call* call) noexcept nogil:
    cdef Params* p = &call.p
    p.value_stride = round_up(p.value_dim, call.format.lanes)
    p.depth_stride = round_up(p.head_dim, call.format.lanes)
    p.copy_queries = must_copy_queries(p, call.format)


cdef bint worth_threads(const Params* p) noexcept nogil:
    """Whether the products are worth several threads; packing the keys counts as eight more rows."""
    cdef double work = 2.0 * (p.head_dim + p.value_dim) * p.kv_len * (p.rows + 8) * p.batches * p.kv_heads
    return work >= MIN_PARALLEL_WORK


cdef bint has_few_tasks(const Call* call, Py_ssize_t blocks) noexcept nogil:
    """Whether the threads have so few tasks, `blocks` a head, that the longest of all heads come first.

    Then all threads end together: 32 take 0.90 of the time (f32 1,32/8,2048,2048,128 causal), its gradients 0.76. With
    more tasks those of a head stay together, which keeps its keys in cache.
    """
    return call.heads * blocks < FEW_TASKS * call.p.n_threads


cdef Py_ssize_t heads_of_task(const Params* p) noexcept nogil:
    """Number of small heads per task: TASK_WORK, if that leaves four tasks per thread."""
    cdef Py_ssize_t heads = p.batches * p.kv_heads, even = heads if p.n_threads == 1 else heads // (4 * p.n_threads)
    cdef double work = 2.0 * (p.head_dim + p.value_dim) * p.kv_len * p.rows
    if p.q_blocks > 1 or p.shared or work > TASK_WORK:
        return 1
    return ix_max(1, ix_min(TASK_WORK // ix_max(1, <Py_ssize_t> work), even))


cdef Py_ssize_t parts_of_fused(const Params* p, const Format* f) noexcept nogil:
    """Number of tasks of a fused kv head of more than few_rows rows: nothing is packed, so any number will do.

    As many as make heads divide evenly among the threads, and as bring queries and sums into L2.
    """
    cdef Py_ssize_t heads = p.batches * p.kv_heads, threads = p.n_threads, parts = 1
    cdef Py_ssize_t bytes = p.rows * ((p.depth_stride if p.copy_queries else 0) + 2 * p.value_stride) * f.real
    cdef Py_ssize_t fit = share_of_l2(SIZES.task_share)
    if p.causal and heads % threads:
        parts = ceil_div(4 * threads, heads)           # of a head the last part is longest
    while 20 * round_up(heads * parts, threads) > 21 * heads * parts or bytes > fit * parts:
        parts += 1
    return ix_max(1, ix_min(parts, p.rows // (4 * GROUP_ROWS)))


cdef Py_ssize_t parts_of_head(const Params* p, const Format* f) noexcept nogil:
    """Number of tasks of a kv head, each of which packs for itself, or 0 if its keys are packed once for all tasks.

    A head whose rows fit in L2 beside a block of keys (without the rarely used sums of nonfinite values) is one task,
    if the heads divide evenly enough among the threads; else it is equal parts, if these are long enough to repay
    packing. Packed keys beyond SHARED_BYTES would come from memory once for each task, so short parts repay it too.
    """
    cdef Py_ssize_t heads = p.batches * p.kv_heads, threads = p.n_threads, parts = 1
    cdef Py_ssize_t row = ix_max(((p.depth_stride if p.copy_queries else 0) + p.value_stride) * f.real, ROW_STATE)
    cdef Py_ssize_t own = share_of_l2(SIZES.own_share) - p.pack_bytes + p.key_products * f.real
    cdef bint even = (not p.causal and p.left < 0 and p.right < 0
                      and p.q_lengths.data == NULL and p.kv_lengths.data == NULL)
    cdef bint beyond = p.k_blocks * p.pack_bytes > SHARED_BYTES
    if p.rows * row > own and not beyond:
        return 0
    while 20 * round_up(heads * parts, threads) > 21 * heads * parts or p.rows * row > own * parts:
        parts += 1
        if not even or p.rows < (SIZES.long_part_rows if beyond else SIZES.part_rows) * parts:
            return 0
    return parts


cdef bint must_copy_queries(const Params* p, const Format* f) noexcept nogil:
    """Whether queries must be copied: wrong dtype, not contiguous, negated, or padded."""
    cdef const Array* a = &p.query
    cdef Py_ssize_t i, odd = <Py_ssize_t> a.data | a.row | a.head
    for i in range(a.n_batch):
        odd |= a.strides[i]
    if p.flip or p.q_lengths.data != NULL or p.unfused != PACKED and p.head_dim < p.depth_stride or odd % f.real != 0:
        return True
    if f.packed < f.real:                                  # pairs in a word
        return a.col != 2 or p.head_dim % 2 != 0
    return not contiguous(p, f, a)


cdef Py_ssize_t rows_of_task(const Call* call) noexcept nogil:
    """SIZES.block_q, or fewer if heads are deep or a thread would have fewer than four tasks; whole register tiles."""
    cdef const Params* p = &call.p
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    cdef Py_ssize_t even = round_up(ceil_div(p.rows * heads, 4 * p.n_threads), GROUP_ROWS)
    cdef Py_ssize_t row = ((p.depth_stride if p.copy_queries else 0) + 2 * p.value_stride) * call.format.real
    cdef Py_ssize_t fit = share_of_l2(SIZES.task_share) // ix_max(row, 1)
    if not p.shared:
        return round_up(ceil_div(p.rows, ix_max(p.parts, 1)), GROUP_ROWS)
    return ix_max(4 * GROUP_ROWS, ix_min(ix_min(SIZES.block_q, fit // GROUP_ROWS * GROUP_ROWS), even))


cdef void balance_blocks(Call* call) noexcept nogil:
    """Set query blocks of at most block_q rows, so that a round's tasks divide by threads if its heads do not."""
    cdef Params* p = &call.p
    cdef Py_ssize_t groups = ceil_div(p.rows, GROUP_ROWS), threads = p.n_threads, common_multiple = threads
    p.q_blocks = ceil_div(p.rows, p.block_q)
    while common_multiple % call.heads:
        common_multiple += threads
    if p.shared and 4 * round_up(p.q_blocks, common_multiple // call.heads) <= groups:
        p.q_blocks = round_up(p.q_blocks, common_multiple // call.heads)
    p.block_q = ceil_div(groups, p.q_blocks) * GROUP_ROWS


@cython.auto_pickle(False)
cdef class Plan:
    """How a call was divided: its path, the sizes of its blocks, and what its tasks shared."""

    cdef readonly str path
    cdef readonly bint shared, kept_scores
    cdef readonly Py_ssize_t splits, block_q, block_k, threads
    cdef readonly double unit               # natural score per unit of the row maxima in a norm


cdef Plan plan_of(const Call* call):
    cdef const Params* p = &call.p
    cdef Plan plan = Plan.__new__(Plan)
    plan.path = PATH_OF[p.path]
    plan.shared, plan.kept_scores = p.shared, p.kept_scores != 0
    plan.splits, plan.block_q, plan.block_k, plan.threads = p.splits, p.block_q, p.block_k, p.n_threads
    plan.unit = p.unit
    return plan


PATH_OF = tuple([PATH_NAMES[i].decode() for i in range(PATHS)])


def path_class(int type, Py_ssize_t rows):
    """An id of the reduction order for `rows` query rows of a kv head; equal ids give rows equal bits.

    Each path sums in an order of its own, and up to SIZES.few_rows rows the keys are split.
    """
    cdef Params p
    memset(&p, 0, sizeof(Params))
    p.mode, p.head_dim, p.rows = ATTEND, 1, rows
    return 2 * path_of_rows(&p, &FORMATS[type]) + (rows > SIZES.few_rows)
