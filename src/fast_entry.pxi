# Fast entries for calls without options: arrays that need no conversion or broadcasting go to the kernels at once.

from libc.math cimport sqrt

cdef enum:
    MAX_THREADS = 4096             # the limit of the checks
    MOST_AXES = 64                 # of NumPy

cdef type ARRAY = numpy.ndarray
cdef object EMPTY = numpy.empty
cdef tuple FAST_DTYPES = (numpy.dtype("f4"), numpy.dtype("f8"), numpy.dtype("f2"))
cdef int[3] FAST_CODES = [F32, F64, F16]


def fast_attention(query, key, value, causal, out, threads, bint explicit):
    """Attention without other options, in half the time if small; None if an argument needs the full checks."""
    cdef Call call
    cdef Params* p = &call.p
    cdef Views views
    cdef Py_buffer* view = views.view
    cdef object dtype
    cdef int code = 0
    cdef bint given
    if type(query) is not ARRAY or type(key) is not ARRAY or type(value) is not ARRAY:
        return None
    dtype = query.dtype
    while dtype is not FAST_DTYPES[code]:
        code += 1
        if code == len(FAST_DTYPES):
            return None
    if key.dtype is not dtype or value.dtype is not dtype or causal is not True and causal is not False:
        return None
    if out is not None and (type(out) is not ARRAY or out.dtype is not dtype):
        return None
    if explicit and not (type(threads) is int and 0 < threads <= MAX_THREADS):
        return None
    memset(&call, 0, sizeof(Call))
    views.held = 0
    code = FAST_CODES[code]
    try:
        open_next(&views, query, code, &p.query, False)
        open_next(&views, key, code, &p.key, False)
        open_next(&views, value, code, &p.value, False)
        if not fast_sizes(p, view):
            return None
        given = out is not None
        if not given:
            shape = query.shape if p.value_dim == p.head_dim else (*query.shape[:view.ndim - 1], p.value_dim)
            out = EMPTY(shape, dtype)
        open_next(&views, out, code, &p.out, False)
        if given and not fast_out(p, view):
            return None
        p.type = F64 if code == F64 else F32
        p.causal, p.left, p.right, p.scale = causal, -1, -1, 1 / sqrt(p.head_dim) if p.head_dim else 1
        prepare(&call, ATTEND)
        start(&call, divide, compute_forward, threads, explicit)
        return out
    finally:
        close_arrays(&views)


def fast_softmax(x, axis, out, bint logarithm, threads, bint explicit):
    """Softmax of a contiguous array along one axis, in half the time if small; None if an argument needs the full
    checks."""
    cdef RowCall call
    cdef RowOp* op = &call.op
    cdef Views views
    cdef Py_buffer* view = views.view
    cdef Py_ssize_t[MOST_AXES] shape, strides
    cdef object dtype
    cdef int code = 0, batch = 0, n, i, along
    cdef bint given = out is not None
    if type(x) is not ARRAY or type(axis) is not int:
        return None
    dtype = x.dtype
    while dtype is not FAST_DTYPES[code]:
        code += 1
        if code == len(FAST_DTYPES):
            return None
    if given and (type(out) is not ARRAY or out.dtype is not dtype):
        return None
    if explicit and not (type(threads) is int and 0 < threads <= MAX_THREADS):
        return None
    memset(&call, 0, sizeof(RowCall))
    views.held = 0
    code = FAST_CODES[code]
    try:
        open_next(&views, x, code, &op.x, False)
        n = view.ndim
        if not (-n <= axis < n) or not PyBuffer_IsContiguous(view, b"C"):
            return None
        if not given:
            out = EMPTY(x.shape, dtype)
        open_next(&views, out, code, &op.out, False)
        if given and not fast_in_place(view):
            return None
        along = axis
        along += n if along < 0 else 0
        op.rows = 1
        for i in range(n):
            if i != along and view.shape[i] != 1:
                shape[batch], strides[batch] = view.shape[i], view.strides[i]
                op.rows *= shape[batch]
                batch += 1
        op.n, op.type, op.logarithm = view.shape[along], F64 if code == F64 else F32, logarithm
        op.x.col = op.out.col = view.strides[along] if op.n != 1 else 0
        op.x.n_batch = op.out.n_batch = op.batch.n = batch
        op.x.shape = op.out.shape = op.batch.shape = shape
        op.x.strides = op.out.strides = strides
        op.columns = columns_of(op)
        start_rows(&call, threads, explicit)
        return out
    finally:
        close_arrays(&views)


cdef bint fast_in_place(Py_buffer* view) noexcept:
    """Whether the second array can receive the softmax of the first: of its shape, contiguous, and in its very memory
    or apart from it."""
    cdef Py_buffer* out = view + 1
    cdef int i
    if out.readonly or out.ndim != view.ndim or not PyBuffer_IsContiguous(out, b"C"):
        return False
    for i in range(view.ndim):
        if out.shape[i] != view.shape[i]:
            return False
    return (out.buf == view.buf or <char*> out.buf + out.len <= <char*> view.buf
            or <char*> view.buf + view.len <= <char*> out.buf)


cdef int open_next(Views* views, object x, int dtype, Array* a, bint writable) except -1:
    open_array(x, dtype, a, &views.view[views.held], ALL_AXES, writable)
    views.held += 1
    return 0


cdef bint fast_sizes(Params* p, Py_buffer* view) noexcept:
    """Set the sizes in p; False unless the arrays have equal ranks and fit without broadcasting."""
    cdef int i, n = view[0].ndim
    cdef Py_ssize_t* q = view[0].shape
    cdef Py_ssize_t* k = view[1].shape
    cdef Py_ssize_t* v = view[2].shape
    if n < 2 or view[1].ndim != n or view[2].ndim != n or k[n - 1] != q[n - 1] or k[n - 2] != v[n - 2]:
        return False
    p.q_len, p.kv_len, p.head_dim, p.value_dim = q[n - 2], k[n - 2], q[n - 1], v[n - 1]
    p.q_heads = p.kv_heads = p.heads_per_kv = p.batches = 1
    if n > 2:
        p.q_heads, p.kv_heads = q[n - 3], k[n - 3]
        if v[n - 3] != p.kv_heads or p.kv_heads == 0 or p.q_heads % p.kv_heads != 0:
            return False
        p.heads_per_kv = p.q_heads // p.kv_heads
    p.batch.n, p.batch.shape = ix_max(0, n - 3), q
    for i in range(n - 3):
        if k[i] != q[i] or v[i] != q[i]:
            return False
        p.batches *= q[i]
    p.rows = p.q_len * p.heads_per_kv
    return True


cdef bint fast_out(const Params* p, Py_buffer* view) noexcept:
    """Whether the fourth array can receive the result of the others: all contiguous, none overlapping it in memory."""
    cdef Py_buffer* out = &view[3]
    cdef int i, last = view[0].ndim - 1
    if out.readonly or out.ndim != last + 1 or out.shape[last] != p.value_dim:
        return False
    for i in range(last):
        if out.shape[i] != view[0].shape[i]:
            return False
    for i in range(4):
        if not PyBuffer_IsContiguous(&view[i], b"C"):
            return False
        if (i < 3 and <char*> view[i].buf < <char*> out.buf + out.len
                and <char*> out.buf < <char*> view[i].buf + view[i].len):
            return False
    return True
