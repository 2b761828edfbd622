# The loops: tasks over threads, blocks of keys within a task, groups of six rows within a block.

include "plan.pxi"

ctypedef void (*Step)(Work*, Py_ssize_t, Task*, int) noexcept nogil


cdef void compute(Work* w) noexcept nogil:
    """All rounds of kv heads; a round holds as many as fit the memory for packed keys or states."""
    cdef Params* p = &w.p
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    w.scratch = w.memory
    w.packed = w.scratch + p.scratch_bytes * p.n_threads
    w.states = w.packed
    if p.shared:
        w.states += w.heads * p.k_blocks * p.pack_bytes
    w.stats = <double*> (w.states + p.state_bytes * p.rows * w.heads * (w.round_splits + 1))
    w.next_poll = seconds() + 0.05
    w.first_head = 0
    while w.first_head < heads and not p.stop:
        w.heads = least(w.heads, heads - w.first_head)
        if p.shared:
            run(w, pack_step, 2 * w.heads * p.k_blocks)
        if w.mode == SCORES:
            run(w, scores_step, w.heads * p.q_blocks * p.splits)
        elif w.mode == WEIGHTS:
            run(w, weights_step, w.heads * p.q_blocks * p.splits)
        elif p.splits == 1:
            run(w, attend_step, w.heads * p.q_blocks, heads_together(p))
        else:
            w.first_split = 0
            while w.first_split < p.splits and not p.stop:
                run(w, split_step, w.heads * least(w.round_splits, p.splits - w.first_split))
                run(w, merge_step, w.heads)
                w.first_split += w.round_splits
        if w.mode == ATTEND and p.weights.data != NULL and not p.keep:
            run(w, weights_step, w.heads * p.q_blocks * p.splits)
        w.first_head += w.heads


cdef void run(Work* w, Step step, Py_ssize_t n, Py_ssize_t together=1) noexcept nogil:
    """Tasks in order, so many together, to the next free thread; they write disjoint memory and need no lock."""
    cdef Py_ssize_t i, shares = ceil_div(n, together)
    cdef int threads = possible_threads(<int> least(w.p.n_threads, shares))
    if threads == 1:                # a parallel region of one thread would cost a microsecond
        for i in range(shares):
            some(w, step, i * together, least(n, (i + 1) * together), 0)
        return
    for i in prange(shares, schedule="dynamic", chunksize=1, num_threads=threads):
        some(w, step, i * together, least(n, (i + 1) * together), threadid())


cdef void some(Work* w, Step step, Py_ssize_t first, Py_ssize_t stop, int thread) noexcept nogil:
    cdef fp_state state
    cdef Task task, laid
    cdef Py_ssize_t i
    if w.p.stop:
        return
    state = fp_enter()
    lay_out(w, w.scratch + thread * w.p.scratch_bytes, &laid)
    for i in range(first, stop):
        task = laid                 # steps may turn its pointers elsewhere
        step(w, i, &task, thread)
    fp_leave(state)
    count_more(&w.done, stop - first)
    poll(w, thread)


cdef void poll(Work* w, int thread) noexcept nogil:
    """Every 50 ms the calling thread lets signal handlers run; a raised exception stops all threads."""
    cdef double now
    if thread == 0:
        now = seconds()
        if now > w.next_poll:
            if run_signal_handlers() or w.progress != NULL and report_progress(w.progress, w.done, w.total):
                w.p.stop = 1
            w.next_poll = seconds() + 0.05


cdef void open_head(Work* w, Task* t, Py_ssize_t head) noexcept nogil:
    """The keys and values of kv head `head`."""
    cdef Params* p = &w.p
    t.batch, t.kv_head = head // p.kv_heads, head % p.kv_heads
    t.lengths = lengths_of(p, t.batch)
    t.key = place_of(&p.key, &p.batch, t.batch, t.kv_head)
    t.value = place_of(&p.value, &p.batch, t.batch, t.kv_head)
    t.key_scale = scales(p, &p.key_scale, t)
    t.value_scale = scales(p, &p.value_scale, t)


cdef const float* scales(const Params* p, const Array* a, const Task* t) noexcept nogil:
    """The factors of the kv head's int8 rows, or NULL."""
    return <const float*> place_of(a, &p.batch, t.batch, t.kv_head)


cdef void open_task(Work* w, Task* t, Py_ssize_t head, Py_ssize_t block, Py_ssize_t split) noexcept nogil:
    """Rows of query block `block` of kv head `head`, their visible keys, and the blocks of keys they need."""
    cdef Params* p = &w.p
    cdef Py_ssize_t r, position, member, first = PTRDIFF_MAX, last = 0
    cdef Range keys
    open_head(w, t, head)
    t.first = first_row(p, block)
    t.rows = first_row(p, block + 1) - t.first
    position, member = t.first // p.group, t.first % p.group
    keys = visible(p, t.lengths, position)
    for r in range(t.rows):
        t.row[r] = Row(keys.start, keys.stop, position, t.kv_head * p.group + member)
        if keys.start < keys.stop:
            first, last = least(first, keys.start), most(last, keys.stop)
        member += 1
        if member == p.group:
            position, member = position + 1, 0
            keys = visible(p, t.lengths, position)
    t.block_start = most(first // p.block_k, split * p.split_k)
    t.block_stop = least(ceil_div(last, p.block_k), (split + 1) * p.split_k)
    open_arrays_of(w, t)


cdef void open_arrays_of(Work* w, Task* t) noexcept nogil:
    """What the task's batch element has of each array."""
    cdef Params* p = &w.p
    t.query = place_of(&p.query, &p.batch, t.batch, 0)
    t.out = place_of(&p.out, &p.batch, t.batch, 0)
    t.lse = place_of(&p.lse, &p.batch, t.batch, 0)
    t.weights = place_of(&p.weights, &p.batch, t.batch, 0)
    t.scores = place_of(&p.scores, &p.batch, t.batch, 0)
    t.mask = place_of(&p.mask, &p.batch, t.batch, 0)
    t.key_mask = place_of(&p.key_mask, &p.batch, t.batch, 0)
    t.bias = place_of(&p.bias, &p.batch, t.batch, 0)
    t.q_segments = place_of(&p.q_segments, &p.batch, t.batch, 0)
    t.k_segments = place_of(&p.k_segments, &p.batch, t.batch, 0)


cdef Packed keys_of(Work* w, Task* t, Py_ssize_t block) noexcept nogil:
    """The packed block: shared ones are ready, a task's own is packed now."""
    cdef Py_ssize_t head = t.batch * w.p.kv_heads + t.kv_head - w.first_head
    if w.p.shared:
        return packed_at(w, w.packed + (head * w.p.k_blocks + block) * w.p.pack_bytes)
    if not w.p.direct:
        w.tile.pack(&w.p, t, block, t.packed)
    return t.packed


cdef void pack_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    """The keys or the values of a block: three blocks are shared by two threads without one waiting."""
    cdef Py_ssize_t block = i // 2 % w.p.k_blocks
    cdef Packed kv = packed_at(w, w.packed + i // 2 * w.p.pack_bytes)
    if i % 2:
        kv.keys = NULL
    else:
        kv.values = NULL
    open_head(w, t, w.first_head + i // 2 // w.p.k_blocks)
    if block * w.p.block_k < t.lengths.kv_length:
        w.tile.pack(&w.p, t, block, kv)


cdef void attend(Work* w, Task* t, int thread) noexcept nogil:
    """Attention of the task's rows over its blocks of keys; rows are closed as soon as they have seen their last one."""
    cdef Params* p = &w.p
    cdef Py_ssize_t block, g, n, groups = ceil_div(t.rows, p.group_rows)
    cdef bint last
    cdef Packed kv
    cdef char* kept = <char*> t.s
    if p.brief and w.tile.attend_short(p, t):
        return
    w.tile.begin(p, t)
    if p.row_wants.any:
        w.tile.begin_seen(p, t)
    for block in range(t.block_start, t.block_stop):
        if p.stop:
            return
        kv = keys_of(w, t, block)
        last = block == t.block_stop - 1
        for g in range(groups):
            n = least(p.group_rows, t.rows - g * p.group_rows)
            attend_group(w, t, g * p.group_rows, n, block, kv, kept)
            if last and p.splits == 1:
                close_group(w, t, g * p.group_rows, n, kept, thread)
        if not last:
            poll(w, thread)
    if t.block_start >= t.block_stop and p.splits == 1:         # these rows see no key
        for g in range(groups):
            close_group(w, t, g * p.group_rows, least(p.group_rows, t.rows - g * p.group_rows), kept, thread)


cdef void attend_group(Work* w, Task* t, Py_ssize_t r, Py_ssize_t n, Py_ssize_t block, Packed kv, char* kept) noexcept nogil:
    """The algorithm for up to six rows and one block of keys, one line a step."""
    cdef const Tile* tile = w.tile
    cdef Params* p = &w.p
    cdef int seen
    if w.mode == WEIGH:
        tile.weigh(p, t, r, n, block, kv)
        return
    seen = tile.classify(p, t, r, n, block)
    if p.keep:
        keep_part(w, t, kept, r, block)
    if seen == SKIP:
        return
    scores(w, t, r, n, block, kv, seen)
    if p.row_wants.any:
        tile.see_scores(p, t, r, n, block)
    tile.softmax(p, t, r, n, block)
    if p.row_wants.any:
        tile.see_weights(p, t, r, n, block)
    if p.value_dim and p.direct:
        tile.values_direct(p, t, n, block)
    elif p.value_dim:
        tile.values(p, t, r, n, block, kv)


cdef void scores(Work* w, Task* t, Py_ssize_t r, Py_ssize_t n, Py_ssize_t block, Packed kv, int seen) noexcept nogil:
    """Finished and masked scores of a group and block."""
    cdef const Tile* tile = w.tile
    cdef Params* p = &w.p
    if p.direct:
        tile.scores_direct(p, t, n, block)
    else:
        tile.scores(p, t, r, n, kv)
    if not p.plain or seen == PARTIAL:
        tile.finish_scores(p, t, r, n)


cdef void close_group(Work* w, Task* t, Py_ssize_t r, Py_ssize_t n, char* kept, int thread) noexcept nogil:
    """Write what is wanted of rows that have seen all their keys."""
    cdef Py_ssize_t k
    if w.mode == WEIGH:                                   # given weights are not normalised
        for k in range(r, r + n):
            t.row_sum[k] = 1
    if w.p.row_wants.any:
        for k in range(r, r + n):                         # to sort a million keys of a row takes a third of a second
            if w.p.stop:
                return
            w.tile.finish_seen(&w.p, t, k, 1)
            poll(w, thread)
    w.tile.finish(&w.p, t, r, n)
    if w.p.keep:
        store_kept(w, t, r, n, kept)


cdef Py_ssize_t part(const Params* p, Py_ssize_t r, Py_ssize_t block) noexcept nogil:
    """The number of the kept part of group and block; a single block needs one part for all groups in turn."""
    return r // p.group_rows * p.k_blocks + block if p.k_blocks > 1 else 0


cdef void keep_part(Work* w, Task* t, char* kept, Py_ssize_t r, Py_ssize_t block) noexcept nogil:
    """Direct the scores of this group and block to their kept place, and note the columns they will cover."""
    cdef Py_ssize_t i = part(&w.p, r, block)
    t.s = kept + i * w.p.group_rows * w.p.width * w.tile.real
    t.kept_part[i] = Range(t.column, t.columns)


cdef void store_kept(Work* w, Task* t, Py_ssize_t r, Py_ssize_t n, char* kept) noexcept nogil:
    """Dense weights of a group from the kept ones; blocks that were not visited are zeros."""
    cdef Py_ssize_t block, i
    for block in range(w.p.k_blocks):
        i = part(&w.p, r, block)
        t.s = kept + i * w.p.group_rows * w.p.width * w.tile.real
        t.column, t.columns = t.kept_part[i].start, t.kept_part[i].stop
        if not t.block_start <= block < t.block_stop:
            t.column, t.columns = 0, 0
        w.tile.store_kept(&w.p, t, r, n, block)


cdef void attend_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    """One query block against all its keys; the last block of a head comes first: causal ones are longest there."""
    open_task(w, t, w.first_head + i // w.p.q_blocks, w.p.q_blocks - 1 - i % w.p.q_blocks, 0)
    attend(w, t, thread)
    keep_stats(w, t)


cdef void keep_stats(Work* w, Task* t) noexcept nogil:
    """Row maxima and sums, where the weights are to be computed again."""
    if w.mode == ATTEND and w.p.weights.data != NULL and not w.p.keep and not w.p.stop:
        w.tile.save_row_stats(&w.p, t, w.stats)


cdef char* state_at(Work* w, Py_ssize_t head, Py_ssize_t i) noexcept nogil:
    """State i of a head of this round; state 0 is the sum of the rounds of splits before."""
    return w.states + (head * (w.round_splits + 1) + i) * w.p.rows * w.p.state_bytes


cdef void split_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    """Few rows against one split of the keys: a state to be merged."""
    cdef Py_ssize_t splits = least(w.round_splits, w.p.splits - w.first_split)
    open_task(w, t, w.first_head + i // splits, 0, w.first_split + i % splits)
    attend(w, t, thread)
    w.tile.save_state(&w.p, t, state_at(w, i // splits, i % splits + 1))


cdef void merge_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    """Merge a head's states in key order; between rounds of splits the sum so far waits in the head's first state."""
    cdef Py_ssize_t g, k, splits = least(w.round_splits, w.p.splits - w.first_split)
    open_task(w, t, w.first_head + i, 0, 0)
    w.tile.begin(&w.p, t)
    for k in range(1 if w.first_split == 0 else 0, splits + 1):
        w.tile.merge_state(&w.p, t, state_at(w, i, k))
    if w.first_split + splits < w.p.splits:
        w.tile.save_state(&w.p, t, state_at(w, i, 0))
    else:
        for g in range(ceil_div(t.rows, w.p.group_rows)):
            close_group(w, t, g * w.p.group_rows, least(w.p.group_rows, t.rows - g * w.p.group_rows), NULL, thread)
        keep_stats(w, t)


cdef void sweep(Work* w, Py_ssize_t i, Task* t, int thread, bint weights) noexcept nogil:
    """All places of the task's rows, block by block, to the array of scores or of weights."""
    cdef Params* p = &w.p
    cdef Py_ssize_t head = i // (p.q_blocks * p.splits), split = i % p.splits, block, g, r, n
    cdef int seen
    cdef Packed kv
    open_task(w, t, w.first_head + head, i // p.splits % p.q_blocks, split)
    w.tile.begin(p, t)
    if p.key_wants.norm != NULL or p.key_wants.given != NULL:
        w.tile.load_norm(p, t)
    elif p.given_lse:
        w.tile.load_lse(p, t)
    elif weights:
        w.tile.load_row_stats(p, t, w.stats)
    for block in range(split * p.split_k, least(p.k_blocks, (split + 1) * p.split_k)):
        if p.stop:
            return
        if t.block_start <= block < t.block_stop:
            kv = keys_of(w, t, block)
        for g in range(ceil_div(t.rows, p.group_rows)):
            r = g * p.group_rows
            n = least(p.group_rows, t.rows - r)
            seen = w.tile.classify(p, t, r, n, block)
            if seen != SKIP:
                scores(w, t, r, n, block, kv, seen)
            if p.given_lse:
                w.tile.store_under_lse(p, t, r, n, block)
            elif weights:
                w.tile.store_again(p, t, r, n, block)
            else:
                w.tile.store_scores(p, t, r, n, block)
        poll(w, thread)


cdef void scores_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    sweep(w, i, t, thread, False)


cdef void weights_step(Work* w, Py_ssize_t i, Task* t, int thread) noexcept nogil:
    sweep(w, i, t, thread, True)
