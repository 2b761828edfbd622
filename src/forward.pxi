# Attention, scores, weights and weighted sum: rounds of kv heads, and the work of task i of a round.


cdef void compute_forward(Call* call) noexcept nogil:
    """Run all rounds; a round has as many kv heads as fit the memory for packed keys or states."""
    cdef Params* p = &call.p
    cdef Py_ssize_t heads = p.batches * p.kv_heads
    call.packed = call.scratch + p.scratch_bytes * p.n_threads
    call.states = call.packed
    if p.shared:
        call.states += call.heads * p.k_blocks * p.pack_bytes
    call.row_norms = <double*> (call.states + p.state_bytes * p.rows * call.heads * (call.round_splits + 1))
    call.first_head = 0
    while call.first_head < heads and not p.stop:
        call.heads = ix_min(call.heads, heads - call.first_head)
        if p.shared:
            run(call, pack_step, 2 * call.heads * p.k_blocks)
        if p.mode == SCORES:
            run(call, scores_step, call.heads * p.q_blocks * p.splits)
        elif p.mode == WEIGHTS_UNDER_LSE:
            run(call, weights_step, call.heads * p.q_blocks * p.splits)
        elif p.splits == 1:
            run(call, attend_step, call.heads * p.q_blocks, heads_of_task(p))
        else:
            call.first_split = 0
            while call.first_split < p.splits and not p.stop:
                run(call, split_step, call.heads * splits_of_round(call))
                run(call, merge_step, call.heads)
                call.first_split += call.round_splits
        if p.mode == ATTEND and p.weights.data != NULL and not p.kept_scores:
            run(call, weights_step, call.heads * p.q_blocks * p.splits)
        call.first_head += call.heads


cdef void pack_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    """Pack the keys or the values of a block; as separate tasks, two threads share three blocks evenly."""
    cdef Py_ssize_t block = i // 2 % call.p.k_blocks
    cdef Packed kv = packed_at(&call.p, call.format, call.packed + i // 2 * call.p.pack_bytes)
    if i % 2:
        kv.keys = NULL
    else:
        kv.values = NULL
    open_head(&call.p, t, call.first_head + i // 2 // call.p.k_blocks)
    call.kernels.pack(call, t, block, kv)


cdef void attend_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    """One query block against all its keys; a head's last block comes first, because causal ones are longest there."""
    cdef Py_ssize_t q_blocks = call.p.q_blocks, head = i // q_blocks, block = i % q_blocks
    if has_few_tasks(call, q_blocks):
        head, block = i % call.heads, i // call.heads
    open_task(&call.p, t, call.first_head + head, q_blocks - 1 - block, 0)
    call.kernels.attend(call, t)


cdef Py_ssize_t splits_of_round(const Call* call) noexcept nogil:
    return ix_min(call.round_splits, call.p.splits - call.first_split)


cdef char* states_of(Call* call, Py_ssize_t head) noexcept nogil:
    """The states of a head of this round: first the merged state of earlier rounds, then one for each split."""
    return call.states + head * (call.round_splits + 1) * call.p.rows * call.p.state_bytes


cdef void split_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    """Few rows against one split of the keys."""
    cdef Py_ssize_t splits = splits_of_round(call), head = i // splits, split = i % splits
    open_task(&call.p, t, call.first_head + head, 0, call.first_split + split)
    call.kernels.split(call, t, states_of(call, head) + (split + 1) * call.p.rows * call.p.state_bytes)


cdef void merge_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    """Merge a head's states of this round into the state of earlier rounds."""
    cdef Py_ssize_t splits = splits_of_round(call)
    open_task(&call.p, t, call.first_head + i, 0, 0)
    call.kernels.merge(call, t, states_of(call, i), 1 if call.first_split == 0 else 0, splits,
                       call.first_split + splits == call.p.splits)


cdef void dense_step(Call* call, Py_ssize_t i, Task* t, bint weights) noexcept nogil:
    cdef Params* p = &call.p
    cdef Py_ssize_t split = i % p.splits, block = i // p.splits % p.q_blocks, head = i // (p.q_blocks * p.splits)
    open_task(p, t, call.first_head + head, block, split)
    call.kernels.dense(call, t, split, weights)


cdef void scores_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    dense_step(call, i, t, False)


cdef void weights_step(Call* call, Py_ssize_t i, Task* t) noexcept nogil:
    dense_step(call, i, t, True)
