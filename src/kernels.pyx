"""The entry points of one instruction set: arrays to Params, one scratch allocation, the loops without the GIL."""

cimport cython
from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer
from cython.parallel cimport prange, threadid
from libc.string cimport memset

include "declarations.pxi"
include "arguments.pxi"
include "plan.pxi"
include "parallel.pxi"
include "forward.pxi"
include "backward.pxi"
include "statistics.pxi"
include "softmax.pxi"
include "probes/probes.pxi"

watch_forks()


def attention(int mode, tuple arrays, tuple batch, tuple sizes, tuple options, int threads, bint explicit):
    """Run one call; options are (accumulation type, causal, left, right, scale, softcap). Returns how it was cut.

    mode is ATTEND (output, lse and weights, of which those given are written), SCORES, WEIGHTED_SUM (output from weights)
    or WEIGHTS_UNDER_LSE. The arrays, in the order of AXES, are query, key, value, out, lse, weights, scores, mask,
    key_mask, bias, q_offset, sinks, slopes, q_segments, k_segments, q_lengths, kv_lengths, q_starts, k_starts, key_scale,
    value_scale. For `threads` see enter_threads.
    """
    cdef Call call
    cdef Py_ssize_t shape[64]
    cdef Views views
    memset(&call, 0, sizeof(Call))
    memset(&views.held, 0, sizeof(views.held))
    try:
        open_call(&call, mode, arrays, batch, sizes, options, shape, &views)
        prepare(&call, mode)
        start(&call, divide, compute, threads, explicit)
        return plan_of(&call)
    finally:
        close_arrays(&views)


include "fast_entry.pxi"


def softmax(tuple arrays, tuple shape_of_x, int type, bint logarithm, int threads, bint explicit):
    """Rows are the last axis of x, out, where (bool or None) and y, all of that shape.

    With y, the result of an earlier call: x is its gradient, and out receives the gradient of what y was computed from.
    """
    cdef RowCall call
    cdef RowOp* op = &call.op
    cdef Py_ssize_t shape[64]
    cdef Py_ssize_t i
    cdef Views views
    cdef Array** targets = [&op.x, &op.out, &op.where, &op.y]
    memset(&call, 0, sizeof(RowCall))
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
        start_rows(&call, threads, explicit)
    finally:
        close_arrays(&views)


def threads_now():
    """What OpenMP would use for a call from this thread now."""
    return default_threads()


def openmp():
    """The date of the OpenMP version the kernels are built with (yyyymm), 0 for none."""
    return openmp_version()
