"""The entry points of one instruction set: arrays to Params, one scratch allocation, the loops without the GIL."""

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer
from cython.parallel cimport prange, threadid
from libc.string cimport memset

include "declarations.pxi"
include "forward.pxi"
include "backward.pxi"
include "statistics.pxi"
include "rowwise.pxi"
include "probes.pxi"

watch_forks()


cdef enum:                          # NumPy's own numbers of dtypes, part of its binary interface
    NUMPY_I8 = 1
    NUMPY_F64 = 12
    NUMPY_F16 = 23
    NUMPY_USER = 256                # from here on dtypes that others have registered: bfloat16, all that checks let in


cdef int take(object x, Array* a, Py_buffer* view, int axes, bint writable) except -1:
    """Open x as an argument; `axes` names its trailing ones (absent or single: stride 0). Whether it is to be closed.

    Of bool and int64 the dtype is not asked. bfloat16, which can not be exported, is opened as its bits in uint16.
    """
    cdef int num, dtype = F32
    if x is None:
        memset(a, 0, sizeof(Array))
        return 0
    num = x.dtype.num
    if num == NUMPY_F64:
        dtype = F64
    elif num == NUMPY_F16:
        dtype = F16
    elif num == NUMPY_I8:
        dtype = I8
    elif num >= NUMPY_USER:
        dtype, x = BF16, x.view("uint16")
    return open_array(x, dtype, a, view, axes, writable)


cdef int open_array(object x, int dtype, Array* a, Py_buffer* view, int axes, bint writable) except -1:
    """Open x as an argument of that dtype."""
    cdef Py_ssize_t k
    memset(a, 0, sizeof(Array))
    PyObject_GetBuffer(x, view, PyBUF_STRIDES | (PyBUF_WRITABLE if writable else 0))
    a.data, a.dtype, a.shape, a.strides = <char*> view.buf, dtype, view.shape, view.strides
    k = view.ndim - 1
    if axes & COL:
        a.col = view.strides[k] if k >= 0 and view.shape[k] != 1 else 0
        k -= 1
    if axes & ROW:
        a.row = view.strides[k] if k >= 0 and view.shape[k] != 1 else 0
        k -= 1
    if axes & HEAD:
        a.head = view.strides[k] if k >= 0 and view.shape[k] != 1 else 0
        k -= 1
    a.n_batch = k + 1 if k >= 0 else 0
    return 1


cdef struct Views:
    Py_buffer view[ARRAYS]
    bint held[ARRAYS]


cdef int open_arrays(int mode, tuple arrays, Array** targets, Views* views) except -1:
    """Open the arrays in the order of AXES; `views.held` says which are to be closed, also after an error."""
    cdef int i
    cdef bint output
    for i in range(ARRAYS):
        output = OUTPUT[i] or i == LSE and mode == ATTEND or i == WEIGHTS_ARRAY and mode in (ATTEND, WEIGHTS)
        views.held[i] = take(arrays[i], targets[i], &views.view[i], AXES[i], output)
    return 0


cdef void close_arrays(Views* views):
    cdef int i
    for i in range(ARRAYS):
        if views.held[i]:
            PyBuffer_Release(&views.view[i])


cdef int set_sizes(Params* p, Py_ssize_t* shape, tuple batch, tuple sizes) except -1:
    """Batch axes into `shape`; sizes are (q_heads, kv_heads, q_len, kv_len, head_dim, value_dim)."""
    cdef Py_ssize_t i
    p.batch.n, p.batch.shape, p.batches = len(batch), shape, 1
    for i in range(p.batch.n):
        shape[i] = batch[i]
        p.batches *= shape[i]
    p.q_heads, p.kv_heads, p.q_len, p.kv_len, p.head_dim, p.value_dim = sizes
    p.group = p.q_heads // p.kv_heads if p.kv_heads else 1
    p.rows = p.q_len * p.group
    return 0


def attention(int mode, tuple arrays, tuple batch, tuple sizes, tuple options, int threads, bint explicit):
    """Run one call; options are (accumulation type, causal, left, right, scale, softcap). Returns how it was cut.

    mode is ATTEND (output, lse and weights, of which those given are written), SCORES, WEIGH (output from weights) or
    WEIGHTS (under a given lse). The arrays, in the order of AXES, are query, key, value, out, lse, weights, scores, mask,
    key_mask, bias, q_offset, sinks, slopes, q_segments, k_segments, q_lengths, kv_lengths, q_starts, k_starts, key_scale,
    value_scale. For `threads` see enter_threads.
    """
    cdef Work work
    cdef Py_ssize_t shape[64]
    cdef Views views
    memset(&work, 0, sizeof(Work))
    memset(&views.held, 0, sizeof(views.held))
    try:
        open_call(&work, mode, arrays, batch, sizes, options, shape, &views)
        prepare(&work, mode)
        start(&work, divide, compute, threads, explicit)
        return plan_of(&work)
    finally:
        close_arrays(&views)


cdef int open_call(Work* w, int mode, tuple arrays, tuple batch, tuple sizes, tuple options,
                   Py_ssize_t* shape, Views* views) except -1:
    """Everything that a call says, in its Params."""
    cdef Params* p = &w.p
    cdef Array** targets = [
        &p.query, &p.key, &p.value, &p.out, &p.lse, &p.weights, &p.scores, &p.mask, &p.key_mask, &p.bias, &p.q_offset,
        &p.sinks, &p.slopes, &p.q_segments, &p.k_segments, &p.q_lengths, &p.kv_lengths,
        &p.q_starts, &p.k_starts, &p.key_scale, &p.value_scale]
    open_arrays(mode, arrays, targets, views)
    p.query.starts = p.out.starts = p.lse.starts = <const int64_t*> p.q_starts.data
    p.key.starts = p.value.starts = <const int64_t*> p.k_starts.data
    set_sizes(p, shape, batch, sizes)
    p.type, p.causal, p.left, p.right, p.scale, p.softcap = options
    return 0


cdef enum:
    LOCAL_BYTES = 32 * 1024            # on the stack, for the scratch of small calls: the allocator takes 0.2 microseconds


ctypedef void (*Phase)(Work*) noexcept nogil


cdef int start(Work* w, Phase cut_up, Phase carry_out, int threads, bint explicit) except -1:
    """Cut the call up, allocate, carry it out, free; a KeyboardInterrupt (or what a handler raised) comes through here.

    A call that is too short to be shared keeps the GIL: to hand it over takes longer than to compute.
    """
    cdef int taken
    cdef bint shared = worth_threads(&w.p)
    cdef char[LOCAL_BYTES] local
    if w.p.rows * w.p.batches * w.p.kv_heads == 0:
        return 0
    taken = enter_threads(threads if shared else 1, explicit)
    w.p.n_threads = taken
    try:
        cut_up(w)
        w.memory = scratch_memory(w.bytes, local, LOCAL_BYTES)
        if w.memory == NULL:
            raise MemoryError(f"attnc: no memory for {w.bytes} bytes of scratch")
        try:
            if shared:
                with nogil:
                    carry_out(w)
            else:
                carry_out(w)
        finally:
            free_scratch(w.memory, local, LOCAL_BYTES)
    finally:
        leave_threads(taken)
    if w.p.stop:
        raise_pending()
    return 0


cdef tuple plan_of(Work* w):
    """How the call was cut: (shared, splits, block_q, block_k, threads, keep)."""
    return (w.p.shared != 0, w.p.splits, w.p.block_q, w.p.block_k, w.p.n_threads, w.p.keep != 0)


include "plain.pxi"


def softmax(tuple arrays, tuple shape_of_x, int type, bint logarithm, int threads, bint explicit):
    """Rows are the last axis of x, out, where (bool or None) and y, all of that shape.

    With y, the result of an earlier call: x is its gradient, and out receives the gradient of what y was computed from.
    """
    cdef RowWork work
    cdef RowOp* op = &work.op
    cdef Py_ssize_t shape[64]
    cdef Py_ssize_t i
    cdef Views views
    cdef Array** targets = [&op.x, &op.out, &op.where, &op.y]
    memset(&work, 0, sizeof(RowWork))
    memset(&views.held, 0, sizeof(views.held))
    try:
        for i in range(4):
            views.held[i] = take(arrays[i], targets[i], &views.view[i], COL, i == 1)
        op.batch.n, op.batch.shape, op.rows = len(shape_of_x) - 1, shape, 1
        for i in range(op.batch.n):
            shape[i] = shape_of_x[i]
            op.rows *= shape[i]
        op.n, op.type, op.logarithm = shape_of_x[op.batch.n], type, logarithm
        op.columns = columns_of(op) if op.y.data == NULL else 0
        start_rows(&work, threads, explicit)
    finally:
        close_arrays(&views)


def threads_now():
    """What OpenMP would use for a call from this thread now."""
    return default_threads()


def openmp():
    """The date of the OpenMP version the kernels are built with (yyyymm), 0 for none."""
    return openmp_version()
