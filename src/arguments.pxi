# Arguments of the entry points: converts attnc's checked arguments and arrays to Params.

cdef enum:                          # trailing axes of an array
    HEAD = 1
    ROW = 2
    COL = 4
    ALL_AXES = HEAD | ROW | COL

cdef enum:
    ARRAYS = 48                     # most arrays of a call

cdef enum:                          # NumPy's type numbers, part of its ABI
    NUMPY_I8 = 1
    NUMPY_F64 = 12
    NUMPY_F16 = 23
    NUMPY_USER = 256                # user-defined dtypes from here on: the checks admit only bfloat16


cdef int open_any(object x, Array* a, Py_buffer* view, int axes, bint writable) except -1:
    """Open x as an argument; `axes` names its trailing axes (stride 0 if absent or of length 1).

    Only the floating dtypes and int8 are told apart. bfloat16 has no buffer format, so its bits are opened as uint16.
    """
    cdef int num, dtype = F32
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
    int held


cdef int take(Views* views, object x, Array* a, int axes, bint writable=False) except -1:
    """Open x, if it is not None, until close_arrays()."""
    if x is not None:
        open_any(x, a, &views.view[views.held], axes, writable)
        views.held += 1
    return 0


cdef void close_arrays(Views* views):
    cdef int i
    for i in range(views.held):
        PyBuffer_Release(&views.view[i])


cdef int set_sizes(Params* p, Py_ssize_t* shape, object args) except -1:
    """Set the sizes; `shape` receives the batch axes."""
    cdef Py_ssize_t i
    cdef object batch = args.batch
    p.batch.n, p.batch.shape, p.batches = len(batch), shape, 1
    for i in range(p.batch.n):
        shape[i] = batch[i]
        p.batches *= shape[i]
    p.q_heads, p.kv_heads, p.q_len, p.kv_len = args.q_heads, args.kv_heads, args.q_len, args.kv_len
    p.heads_per_kv = p.q_heads // p.kv_heads if p.kv_heads else 1
    p.rows = p.q_len * p.heads_per_kv
    p.type = F64 if args.acc.num == NUMPY_F64 else F32
    return 0


cdef int open_operands(Params* p, object args, Views* views) except -1:
    """Open query, key and all options of attention."""
    cdef Py_buffer* lists
    cdef object window = args.window, q_offset = args.q_offset, softcap = args.softcap
    take(views, args.query, &p.query, ALL_AXES)
    take(views, args.key, &p.key, ALL_AXES)
    take(views, args.mask, &p.mask, ALL_AXES)
    take(views, args.key_mask, &p.key_mask, COL)
    if args.block_mask is not None:
        take(views, args.block_mask, &p.block_mask, ALL_AXES)
        p.mask_rows, p.mask_keys, p.mask_row, p.mask_key = args.block_sizes
    if args.key_indices is not None:
        lists = &views.view[views.held]
        take(views, args.key_indices, &p.key_indices, ALL_AXES)
        p.list_keys = lists.shape[lists.ndim - 1]
        p.list_heads = p.q_heads // ix_max(1, lists.shape[lists.ndim - 3])
    take(views, args.bias, &p.bias, ALL_AXES)
    take(views, args.relative_bias, &p.relative if p.bias.data != NULL else &p.bias, ALL_AXES)
    take(views, None if q_offset is None else numpy.asarray(q_offset, numpy.int64), &p.q_offset, 0)
    take(views, args.k_positions, &p.k_positions, HEAD | COL)
    take(views, args.sinks, &p.sinks, HEAD)
    take(views, args.alibi_slopes, &p.slopes, HEAD)
    take(views, args.q_segments, &p.q_segments, ROW)
    take(views, args.k_segments, &p.k_segments, COL)
    take(views, args.q_lengths, &p.q_lengths, 0)
    take(views, args.kv_lengths, &p.kv_lengths, 0)
    take(views, args.key_scale, &p.key_scale, HEAD | ROW)
    if args.relative_index is not None:
        p.relative_index = <const int32_t*> pointer(args.relative_index, views)
        take(views, args.relative_key, &p.relative_key, ALL_AXES)
        take(views, args.relative_query, &p.relative_query, ALL_AXES)
    p.head_dim, p.scale, p.causal = args.head_dim, args.scale, args.causal
    p.softcap = 0 if softcap is None else softcap
    if window is not None:
        left, right = window
        p.left, p.right = -1 if left is None else left, -1 if right is None else right
    return 0


cdef int open_packed(Params* p, object q_starts, object k_starts, object key_rows, Views* views) except -1:
    """Set where rows and keys lie: the first rows of packed sequences, and the rows of keys."""
    take(views, q_starts, &p.q_starts, 0)
    take(views, k_starts, &p.k_starts, 0)
    take(views, key_rows, &p.key_rows, HEAD | COL)
    p.query.starts = p.out.starts = p.lse.starts = <const int64_t*> p.q_starts.data
    p.key.starts = p.value.starts = <const int64_t*> p.k_starts.data
    return 0


cdef void* pointer(object x, Views* views) except? NULL:
    """The memory of a contiguous array, or NULL for None."""
    if x is None:
        return NULL
    PyObject_GetBuffer(x, &views.view[views.held], PyBUF_STRIDES)
    views.held += 1
    return views.view[views.held - 1].buf
