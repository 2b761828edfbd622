# How a call is cut: blocks, splits, rounds of kv heads, and the scratch they need.
#
# Rule 21 of the semantics: a row's bits may depend on block_k and split_k, which count from key 0 and follow from the
# depths, the dtype and whether rows are few, q_len * q_heads / kv_heads of them. block_q, rounds, sharing and the number
# of threads only say who computes what.

cdef enum:
    # Between the scratch of two threads: what processors fetch ahead of strided accesses (32 KB on Zen 5) takes lines
    # from the thread that writes them. A softmax of (64, 64, 128) along axis 1: 164 microseconds, and 69 so.
    SCRATCH_GAP = 64 * 1024
    SHARED_BYTES = 16 * 1024 * 1024  # keys and values of a round; above 32 MB the C library would map new pages each call
    STATE_BYTES = 16 * 1024 * 1024
    # FLOP that two threads share: 0.66 M took 8.1 microseconds alone and 7.0 by two whose pool was awake, 2.4 M 16.3 and
    # 11.3, 4.7 M 29.5 and 18.2; the border is above the break-even because a pool that sleeps has to be woken first.
    LEAST_PARALLEL_WORK = 2000000
    TASK_WORK = 4000000              # FLOP of small heads that are one task: 15 microseconds
    ROW_STATE = 64                   # bytes that a task keeps of a row beside its query and sums


cdef Py_ssize_t padded(Py_ssize_t nbytes) noexcept nogil:
    return round_up(nbytes, 64)


cdef void prepare(Work* w, int mode) noexcept nogil:
    """What follows from the options alone."""
    cdef Params* p = &w.p
    cdef double magnitude = p.scale if p.scale >= 0 else -p.scale
    w.mode = mode
    p.direct = p.rows <= DIRECT_ROWS and mode not in (WEIGH, BACKWARD) and not w.uniform
    w.tile = &TILES[DOT if multiplies_pairs(w) else p.type]
    p.strips = p.direct and p.rows > GROUP_ROWS and 2 * p.rows > w.tile.lanes and p.head_dim > 0
    p.group_rows = (round_up(p.rows, rows_of_strip(w.tile)) if p.strips else p.rows) if p.direct else GROUP_ROWS
    p.arrays = p.mask.data != NULL or p.key_mask.data != NULL or p.bias.data != NULL or p.q_segments.data != NULL
    # A magnitude that is no ordinary float would leave the exponent without digits: it takes the general path.
    p.plain = (p.softcap == 0 and p.bias.data == NULL and p.slopes.data == NULL and 1e-30 < magnitude < 1e30)
    p.given_lse = mode == WEIGHTS
    if mode == SCORES:
        p.unit, p.c = 1, 1
        p.plain, p.flip = p.plain and p.scale == 1, 0
        return
    p.flip = p.plain and p.scale < 0
    p.unit = magnitude if p.plain else 1
    p.c = p.unit * 1.4426950408889634


cdef bint multiplies_pairs(const Work* w) noexcept nogil:
    """Whether the products are bfloat16 dot products: the set has them, and all that is multiplied is bfloat16 and summed
    as float, which values that this call does not see may forbid; what is read in place is whole vectors and chunks."""
    cdef const Params* p = &w.p
    cdef bint whole = p.head_dim % (2 * TILES[F32].lanes) == 0 and p.value_dim % TILES[F32].panel == 0
    return (HAS_DOT and (whole or not p.direct) and w.mode not in (WEIGH, BACKWARD) and p.type == F32
            and p.query.dtype == BF16 and p.key.dtype == BF16 and (p.value.data == NULL or p.value.dtype == BF16))


cdef void divide(Work* w) noexcept nogil:
    """Block sizes, the parts of the scratch memory and their bytes."""
    cdef Params* p = &w.p
    cdef Py_ssize_t real = w.tile.real, heads = p.batches * p.kv_heads, per_head, kept_rows = 0
    cdef Task unused
    p.value_stride = round_up(p.value_dim, w.tile.lanes)
    p.depth_stride = round_up(p.head_dim, w.tile.lanes)
    p.copied = queries_copied(p, w.tile)
    p.block_k = SIZES.most_block_k
    while p.block_k > SIZES.least_block_k and p.block_k * (p.head_dim + p.value_dim) * real > SIZES.block_bytes:
        p.block_k //= 2
    if p.direct and not p.strips:
        p.block_k = SIZES.direct_block_k
    p.k_blocks = ceil_div(p.kv_len, p.block_k)
    p.brief = at_once(w)
    p.width = least(p.block_k, round_up(p.kv_len, w.tile.panel))
    if p.strips:
        p.width += w.tile.panel                # rows a power of two apart would share lines of L1
    p.pack_bytes = packed_bytes(w)
    p.split_k = p.k_blocks if p.rows > SIZES.few_rows or w.uniform else SIZES.split_k // p.block_k
    p.splits = most(1, ceil_div(p.k_blocks, p.split_k)) if p.k_blocks else 1
    p.whole = parts_of_head(p, real) if p.rows > SIZES.few_rows else 0
    p.shared = p.rows > SIZES.few_rows and not p.whole
    if w.mode == ATTEND and p.weights.data != NULL and p.splits == 1 and p.k_blocks:
        # Few enough rows a task that all its scores stay in L2 until the row sums are known, if that is two groups.
        # With a single block of keys a group is closed before the next one begins: one part, in L1.
        kept_rows = share_of_l2(SIZES.keep_share) // (p.k_blocks * p.width * real) // GROUP_ROWS * GROUP_ROWS
        if p.k_blocks == 1:
            p.keep, kept_rows = 1, p.rows
        elif kept_rows >= (p.rows if p.rows <= SIZES.few_rows else 2 * GROUP_ROWS):
            p.keep = 1
            if kept_rows < p.rows:
                p.whole, p.shared = 0, 1
    p.block_q = rows_of_a_task(w)
    if p.keep and p.k_blocks > 1:
        p.block_q = least(p.block_q, kept_rows)
    if heap_rows(w) < p.block_q:
        p.block_q = heap_rows(w)
        if p.whole:
            p.whole, p.shared = 0, 1

    per_head = p.k_blocks * p.pack_bytes
    w.heads = heads
    if p.shared and per_head * heads > SHARED_BYTES:            # in rounds of the same number of heads
        w.heads = ceil_div(heads, ceil_div(heads, most(1, SHARED_BYTES // per_head)))
    share_rows(w)
    if p.keep and p.k_blocks > 1:
        p.keep = ceil_div(p.block_q, p.group_rows) * p.k_blocks
    p.scratch_bytes = lay_out(w, <char*> &unused, &unused) + (SCRATCH_GAP if p.n_threads > 1 else 0)
    w.round_splits = p.splits
    w.total = heads * p.q_blocks * p.splits + (2 * heads * p.k_blocks if p.shared else 0)
    p.state_bytes = 0
    if p.splits > 1 and w.mode in (ATTEND, WEIGH):
        p.state_bytes = padded((2 * p.value_stride + w.tile.lanes) * real + 8)
        w.heads = least(heads, most(1, STATE_BYTES // (p.rows * p.state_bytes * (p.splits + 1))))
        w.round_splits = least(p.splits, most(w.p.n_threads, STATE_BYTES // (p.rows * p.state_bytes)))
    w.bytes = p.scratch_bytes * p.n_threads
    w.bytes += per_head * w.heads if p.shared else 0
    w.bytes += p.state_bytes * p.rows * w.heads * (w.round_splits + 1)
    if w.mode == ATTEND and p.weights.data != NULL and not p.keep:
        w.bytes += padded(16 * p.rows * heads)


cdef Py_ssize_t packed_bytes(const Work* w) noexcept nogil:
    """Of a block of keys and values."""
    cdef const Params* p = &w.p
    return (padded(p.width * round_up(p.head_dim, 2) * w.tile.packed)
            + padded(p.width * p.value_stride * w.tile.packed) + padded(p.width * 4 + 64))


cdef bint worth_threads(const Params* p) noexcept nogil:
    """Whether the call is long enough to share: products, and packing the keys as so many products of eight rows."""
    cdef double work = 2.0 * (p.head_dim + p.value_dim) * p.kv_len * (p.rows + 8) * p.batches * p.kv_heads
    return work >= LEAST_PARALLEL_WORK


cdef Py_ssize_t heads_together(const Params* p) noexcept nogil:
    """How many small heads are one task, which then costs little: so many FLOP, if that leaves four tasks a thread."""
    cdef Py_ssize_t heads = p.batches * p.kv_heads, even = heads if p.n_threads == 1 else heads // (4 * p.n_threads)
    cdef double work = 2.0 * (p.head_dim + p.value_dim) * p.kv_len * p.rows
    if p.q_blocks > 1 or p.shared or work > TASK_WORK:
        return 1
    return most(1, least(TASK_WORK // most(1, <Py_ssize_t> work), even))


cdef Py_ssize_t parts_of_head(const Params* p, Py_ssize_t real) noexcept nogil:
    """Into how many tasks that pack for themselves a kv head is cut, or 0 where its keys are packed once for all.

    One task takes a head whose rows fit in L2 beside a block of keys (their sums of values kept apart are not touched as
    a rule), if the heads divide among the threads without leaving one idle for long; else each takes an equal part, if the
    parts still are long enough for what packing costs.
    """
    cdef Py_ssize_t heads = p.batches * p.kv_heads, threads = p.n_threads, parts = 1
    cdef Py_ssize_t row = most(((p.depth_stride if p.copied else 0) + p.value_stride) * real, ROW_STATE)
    cdef bint even = not p.causal and p.left < 0 and p.right < 0 and p.q_lengths.data == NULL and p.kv_lengths.data == NULL
    if p.rows * row + p.pack_bytes > share_of_l2(SIZES.whole_share):
        return 0
    while 20 * round_up(heads * parts, threads) > 21 * heads * parts:
        parts += 1
        if not even or p.rows < SIZES.part_rows * parts:
            return 0
    return parts


cdef bint queries_copied(const Params* p, const Tile* tile) noexcept nogil:
    """Whether some query row can not be read in place: another dtype, gaps, a sign to change, padding to be zero."""
    cdef const Array* a = &p.query
    cdef Py_ssize_t i, odd = <Py_ssize_t> a.data | a.row | a.head
    for i in range(a.n_batch):
        odd |= a.strides[i]
    if p.flip or p.q_lengths.data != NULL or p.direct and p.head_dim < p.depth_stride or odd % tile.real != 0:
        return True
    if tile.packed < tile.real:                            # pairs in a word
        return a.col != 2 or p.head_dim % 2 != 0
    return not in_place(p, tile, a)


cdef bint at_once(const Work* w) noexcept nogil:
    """Whether strips of rows take all steps at once: few rows and keys, no options, only the output wanted."""
    cdef const Params* p = &w.p
    return (w.mode == ATTEND and p.out.data != NULL and fits_strips(w)
            and p.kv_len <= least(p.block_k, SHORT_KEYS)
            and p.head_dim <= SHORT_DEPTH and p.head_dim % w.tile.lanes == 0 and p.value_dim % rows_of_strip(w.tile) == 0
            and p.plain and not p.arrays and p.left < 0 and p.sinks.data == NULL and p.q_starts.data == NULL
            and p.q_lengths.data == NULL and p.key_scale.data == NULL and w.tile.packed == w.tile.real
            and p.lse.data == NULL and p.weights.data == NULL and p.scores.data == NULL and not p.row_wants.any)


cdef bint fits_strips(const Work* w) noexcept nogil:
    """Whether rows fill strips: so few as read their keys in place, or strips of which a sixth is free at most (24 rows of 32
    and 400 keys: 11 % slower). Vectors of 16 bytes, without broadcasts from memory, would take 1.2 to 2.4 of the time."""
    cdef const Params* p = &w.p
    if w.tile.lanes * w.tile.real < 32:
        return False
    if p.direct:
        return p.strips and p.kv_len <= DIRECT_KEYS
    return p.rows <= SIZES.few_rows and 5 * round_up(p.rows, rows_of_strip(w.tile)) <= 6 * p.rows


cdef bint in_place(const Params* p, const Tile* tile, const Array* a) noexcept nogil:
    """Whether rows of the array are what is computed with, without gaps."""
    return a.dtype == p.type and a.col == tile.real


cdef Py_ssize_t rows_of_strip(const Tile* tile) noexcept nogil:
    """As strips.h has it."""
    return most(8, tile.lanes)


cdef Py_ssize_t rows_of_a_task(const Work* w) noexcept nogil:
    """SIZES.block_q, or less where heads are deep or that leaves fewer than four tasks a thread; whole register tiles."""
    cdef const Params* p = &w.p
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    cdef Py_ssize_t even = round_up(ceil_div(p.rows * heads, 4 * p.n_threads), GROUP_ROWS)
    cdef Py_ssize_t row = ((p.depth_stride if p.copied else 0) + 2 * p.value_stride) * w.tile.real
    cdef Py_ssize_t fit = share_of_l2(SIZES.task_share) // most(row, 1)
    if not p.shared:
        return round_up(ceil_div(p.rows, most(p.whole, 1)), GROUP_ROWS)
    return most(4 * GROUP_ROWS, least(least(SIZES.block_q, fit // GROUP_ROWS * GROUP_ROWS), even))


cdef void share_rows(Work* w) noexcept nogil:
    """Query blocks of a head, of at most block_q rows: where a round's heads do not divide among the threads, its tasks do."""
    cdef Params* p = &w.p
    cdef Py_ssize_t groups = ceil_div(p.rows, GROUP_ROWS), threads = p.n_threads, least_common = threads
    p.q_blocks = ceil_div(p.rows, p.block_q)
    while least_common % w.heads:
        least_common += threads
    if p.shared and 4 * round_up(p.q_blocks, least_common // w.heads) <= groups:
        p.q_blocks = round_up(p.q_blocks, least_common // w.heads)
    p.block_q = ceil_div(groups, p.q_blocks) * GROUP_ROWS


cdef Py_ssize_t first_row(const Params* p, Py_ssize_t block) noexcept nogil:
    """Where a query block begins: blocks differ by one register tile of rows at most, so that no thread waits long."""
    return least(ceil_div(p.rows, GROUP_ROWS) * block // p.q_blocks * GROUP_ROWS, p.rows)


cdef char* cut(char** at, Py_ssize_t nbytes) noexcept nogil:
    """The next part of the scratch."""
    cdef char* part = at[0]
    at[0] += padded(nbytes)
    return part


cdef Py_ssize_t lay_out(const Work* w, char* scratch, Task* t) noexcept nogil:
    """Give the task its places in the scratch; returns the bytes."""
    cdef const Params* p = &w.p
    cdef Py_ssize_t real = w.tile.real, rows = p.block_q, sums = rows * p.value_stride * real
    cdef Py_ssize_t group = p.group_rows * p.width             # places of a group and block
    cdef char* at = scratch
    t.q = cut(&at, rows * p.depth_stride * real if p.copied else 0)
    t.strips = cut(&at, p.group_rows * p.depth_stride * real if p.strips else 0)
    t.wide = cut(&at, p.kv_len * (p.head_dim + p.value_dim) * real if p.brief and not (
        in_place(p, w.tile, &p.key) and in_place(p, w.tile, &p.value)) else 0)
    t.s = cut(&at, most(p.keep, 1) * group * real)
    t.o = cut(&at, sums)
    t.apart_o = cut(&at, sums)
    t.row_max = cut(&at, rows * real + 64)
    t.alpha = cut(&at, p.group_rows * real + 64)
    t.block_max = cut(&at, rows * p.k_blocks * real + 64 if p.keep else 0)
    t.row_sum = <double*> cut(&at, rows * 8)
    t.row = <Row*> cut(&at, rows * sizeof(Row))
    t.bias_rows = cut(&at, group * real if p.bias.data != NULL else 0)
    t.allow = <unsigned char*> cut(&at, group if p.arrays or w.mode == WEIGH else 0)
    t.line = cut(&at, (most((w.tile.lanes if p.direct else 4) * p.depth_stride, most(2 * p.value_stride, p.width)) + w.tile.lanes) * real)
    t.packed = packed_at(w, cut(&at, direct_bytes(w) if p.direct else 0 if p.shared else p.pack_bytes))
    t.kept_part = <Range*> cut(&at, p.keep * sizeof(Range))
    t.q_rows = <const void**> cut(&at, rows * sizeof(void*))
    t.peaks = cut(&at, p.group_rows * 64)
    t.final_max = cut(&at, rows * real + 64)
    t.inverse = <double*> cut(&at, rows * 8)
    t.halves = <uint16_t*> cut(&at, group * 2 if w.tile.packed < real else 0)
    lay_out_seen(w, &at, t)
    return padded(at - scratch)


cdef Py_ssize_t direct_bytes(const Work* w) noexcept nogil:
    """Two copies of a chunk of a step's values, and the list of those kept apart."""
    return 2 * DIRECT_KEYS * w.tile.panel * w.tile.real + DIRECT_KEYS * 4 + 64


cdef Packed packed_at(const Work* w, char* s) noexcept nogil:
    """The parts of one packed block of keys and values."""
    cdef const Params* p = &w.p
    cdef Packed kv
    kv.keys = s
    if p.direct:
        kv.values = s + DIRECT_KEYS * w.tile.panel * w.tile.real
        kv.n_apart = <Py_ssize_t*> (s + 2 * DIRECT_KEYS * w.tile.panel * w.tile.real)
        kv.apart = <int*> (<char*> kv.n_apart + 64)
        return kv
    kv.values = s + padded(p.width * round_up(p.head_dim, 2) * w.tile.packed)
    kv.n_apart = <Py_ssize_t*> (s + p.pack_bytes - padded(p.width * 4 + 64))
    kv.apart = <int*> (<char*> kv.n_apart + 64)
    return kv
