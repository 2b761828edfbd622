# Fast entry for calls without options: arrays that need no conversion or broadcasting go to Params at once.

from libc.math cimport sqrt

cdef enum:
    MAX_THREADS = 4096             # the limit of the checks

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
