# Probes of this machine's limits, and hooks by which the tests reach single primitives.

cdef extern from "probes/probes.h" nogil:
    enum: VECTOR_BYTES
    enum: CHAINS
    double multiply_add_f32(long n, float x) noexcept
    double multiply_add_f64(long n, double x) noexcept
    double multiply_add_bf16(long n, float x) noexcept
    double read_bytes(const char* p, Py_ssize_t n) noexcept
    void copy_bytes(char* p, const char* source, Py_ssize_t n) noexcept
    void fill_bytes(char* p, Py_ssize_t n) noexcept

cdef double sink = 0                # the sums of probes, so that the compiler keeps their loops


cdef double run_probe(int type, long n, char* data, Py_ssize_t nbytes, int threads, bint write,
                      const char* source) noexcept nogil:
    """Seconds that `threads` threads take: n multiply-and-add steps each, or their share of the bytes."""
    cdef int i
    cdef double began = seconds(), total = 0
    cdef Py_ssize_t share = nbytes // threads
    for i in prange(threads, schedule="static", chunksize=1, num_threads=threads, use_threads_if=threads > 1):
        if source != NULL:
            copy_bytes(data + i * share, source + i * share, share)
        elif write:
            fill_bytes(data + i * share, share)
        elif data != NULL:
            total += read_bytes(data + i * share, share)
        elif type == F32:
            total += multiply_add_f32(n, <float> 0.999)
        elif type == BF16:
            total += multiply_add_bf16(n, <float> 0.999)
        else:
            total += multiply_add_f64(n, 0.999)
    global sink
    sink = total
    return seconds() - began


cdef int refuse_too_many(int threads) except -1:
    if possible_threads(threads) < threads:
        raise RuntimeError(f"the system refuses to create {threads} threads")
    return 0


def fma_peak(str dtype, int num_threads, double duration=0.01):
    """FLOP/s of multiply-and-adds of whole vectors in registers, over all threads, in about `duration` seconds."""
    cdef int type = F32 if dtype == "float32" else BF16 if dtype == "bfloat16" else F64
    cdef int lanes = VECTOR_BYTES // (8 if type == F64 else 2 if type == BF16 and bf16_dot else 4)
    cdef long n = 10000
    cdef double took
    refuse_too_many(num_threads)
    if dtype not in ("float32", "float64", "bfloat16"):
        raise ValueError(f"fma_peak: dtype must be 'float32', 'float64' or 'bfloat16', got {dtype!r}")
    with nogil:                     # the shorter of two runs: another process may have delayed one
        took = min(run_probe(type, n, NULL, 0, 1, False, NULL), run_probe(type, n, NULL, 0, 1, False, NULL))
    n = <long> ix_max(n, <Py_ssize_t> (n * duration / took))
    with nogil:
        took = run_probe(type, n, NULL, 0, num_threads, False, NULL)
    return 2.0 * CHAINS * lanes * n * num_threads / took


cdef double timed_memory(object array, int num_threads, bint write, const char* source=NULL) except -1:
    cdef Py_buffer view
    cdef double took
    refuse_too_many(num_threads)
    PyObject_GetBuffer(array, &view, PyBUF_WRITABLE if write else 0)
    try:
        with nogil:
            took = run_probe(F32, 0, <char*> view.buf, view.len, num_threads, write, source)
    finally:
        PyBuffer_Release(&view)
    return took


def read_bandwidth(array, int num_threads):
    """Reading a contiguous array once, in bytes/s over all threads."""
    return array.nbytes / timed_memory(array, num_threads, False)


def fill(array, int num_threads):
    """Seconds to write a contiguous array once with the stores the kernels use."""
    return timed_memory(array, num_threads, True)


def copy(source, target, int num_threads):
    """Seconds to copy a contiguous array to another of its size past the caches."""
    cdef Py_buffer view
    PyObject_GetBuffer(source, &view, 0)
    try:
        if view.len != target.nbytes:
            raise ValueError(f"copy: {view.len} bytes do not fill {target.nbytes}")
        return timed_memory(target, num_threads, True, <char*> view.buf)
    finally:
        PyBuffer_Release(&view)


cdef extern from "probes/hooks.h" nogil:
    void apply_exp2_f32(float* x, Py_ssize_t n) noexcept
    void apply_exp2_f64(double* x, Py_ssize_t n) noexcept
    void apply_tanh_f32(float* x, Py_ssize_t n) noexcept
    void apply_tanh_f64(double* x, Py_ssize_t n) noexcept
    void widen_f32(const char* x, int dtype, float* y, Py_ssize_t n) noexcept
    void narrow_f32(const float* x, char* y, int dtype, Py_ssize_t n) noexcept


def apply(str function, array):
    """Test hook: exp2 (of numbers up to 0) or tanh of a contiguous float32 or float64 array, in place."""
    cdef Py_buffer view
    cdef fp_state state
    PyObject_GetBuffer(array, &view, PyBUF_WRITABLE)
    try:
        state = fp_enter()
        if function == "exp2":
            if view.itemsize == 4:
                apply_exp2_f32(<float*> view.buf, view.len // 4)
            else:
                apply_exp2_f64(<double*> view.buf, view.len // 8)
        elif view.itemsize == 4:
            apply_tanh_f32(<float*> view.buf, view.len // 4)
        else:
            apply_tanh_f64(<double*> view.buf, view.len // 8)
        fp_leave(state)
    finally:
        PyBuffer_Release(&view)


def convert(source, target, int dtype, bint widen):
    """Test hook: 16-bit patterns of `dtype` to float32 (widen) or back, contiguous arrays."""
    cdef Py_buffer x, y
    PyObject_GetBuffer(source, &x, 0)
    try:
        PyObject_GetBuffer(target, &y, PyBUF_WRITABLE)
        if widen:
            widen_f32(<char*> x.buf, dtype, <float*> y.buf, x.len // 2)
        else:
            narrow_f32(<float*> x.buf, <char*> y.buf, dtype, x.len // 4)
        PyBuffer_Release(&y)
    finally:
        PyBuffer_Release(&x)


cdef object traced = None           # holds the records


def trace(int threads, records=None):
    """Benchmark hook: cut calls for a number of threads, and run them on one.

    It writes (phase, processor time) of each share of tasks into `records`, a float64 array of shape (n, 2); with 0
    threads the hook ends. Returns how many shares there were since the last call.
    """
    cdef Py_buffer view
    cdef Py_ssize_t n = tracing.n
    global traced
    memset(&tracing, 0, sizeof(Trace))
    traced = records
    if records is not None:
        PyObject_GetBuffer(records, &view, PyBUF_WRITABLE)
        tracing.records, tracing.room = <double (*)[2]> view.buf, view.len // 16
        PyBuffer_Release(&view)
    tracing.threads = threads
    return n


def refuse_memory(int granted_before):
    """Test hook: let this many allocations succeed and fail the next one; -1: none. Returns whether one was due."""
    cdef bint waiting = granted >= 0
    global granted
    granted = granted_before
    return waiting
