# Arguments of the entry points: Python's arrays to Params.

cdef enum:
    ARRAYS = 21
    LSE = 4
    WEIGHTS_ARRAY = 5
    HEAD = 1
    ROW = 2
    COL = 4

cdef int[ARRAYS] AXES = [HEAD | ROW | COL, HEAD | ROW | COL, HEAD | ROW | COL, HEAD | ROW | COL, HEAD | ROW, HEAD | ROW | COL,
                     HEAD | ROW | COL, HEAD | ROW | COL, COL, HEAD | ROW | COL, 0, HEAD, HEAD, ROW, COL, 0, 0, 0, 0, HEAD | ROW,
                     HEAD | ROW]
cdef int[ARRAYS] OUTPUT = [0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]   # lse and weights: as the mode is

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
        output = OUTPUT[i] or i == LSE and mode == ATTEND or i == WEIGHTS_ARRAY and mode in (ATTEND, WEIGHTS_UNDER_LSE)
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


cdef int open_call(Call* call, int mode, tuple arrays, tuple batch, tuple sizes, tuple options,
                   Py_ssize_t* shape, Views* views) except -1:
    """Everything that a call says, in its Params."""
    cdef Params* p = &call.p
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
