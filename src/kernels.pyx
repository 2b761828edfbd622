"""Entry points of a kernel module: convert arrays to Params, allocate scratch once, run the loops without the GIL."""

cimport cython
from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer
from cython.parallel cimport prange, threadid
from libc.string cimport memset

import numpy

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


MODES = {"attend": ATTEND, "scores": SCORES, "weighted_sum": WEIGHTED_SUM, "weights_under_lse": WEIGHTS_UNDER_LSE,
         "key_statistics": KEY_STATISTICS, "backward": BACKWARD}


def compute(str mode, args, int threads, bint explicit, request=None, progress=None, *, value=None, out=None, lse=None,
            weights=None, scores=None, norm=None, given=None, value_scale=None,
            q_starts=None, k_starts=None, key_rows=None, grad_output=None, output=None, grad_lse=None, delta=None,
            d_query=None, d_key=None, d_value=None, d_bias=None, d_relative_bias=None, d_relative_key=None,
            d_relative_query=None, int relevance=0, row_factors=None, key_factors=None):
    """Run one call for checked arguments, and return its Plan.

    `mode` is what to compute into the arrays that are not None:

    attend             output, lse and weights; with a RowRequest (attnc/_call.py) statistics of rows
    scores             dense scores
    weights_under_lse  dense weights under the lse of each row, or under the `norm` that statistics of rows wrote
    weighted_sum       output from weights; `args` has no query and key
    key_statistics     the statistics of a KeyRequest
    backward           delta of each row and the gradients d_query, d_key, d_value, d_relative_key and
                       d_relative_query, the last two for each batch element and head, and adds to d_bias and
                       d_relative_bias; `norm` replaces the lse of rows whose inverse sum in it is above 0. With
                       `relevance` (1: signed, 2: positive) no delta: d_query is the relevance times `key_factors`,
                       d_key its transpose times `row_factors`

    `value_scale` has the factors of int8 values; `q_starts` and `k_starts` are the first rows of packed sequences;
    `key_rows`, contiguous int64 (batch..., kv_heads or 1, kv_len), is the row of key and value in which each key lies,
    so that these may have any length, and what stands past a kv_length is not read; int8 keys, weighted_sum, d_key and
    d_value do not go with it. `progress` is a function of (done, total). For `threads` see enter_threads().
    """
    cdef Call call
    cdef Gradients gradients
    cdef Params* p = &call.p
    cdef Py_ssize_t shape[64]
    cdef Views views
    cdef int m = MODES[mode]
    memset(&call, 0, sizeof(Call))
    views.held = 0
    try:
        set_sizes(p, shape, args)
        p.left, p.right, p.scale = -1, -1, 1
        if m != WEIGHTED_SUM:
            open_operands(p, args, &views)
        take(&views, value, &p.value, ALL_AXES)
        p.value_dim = 0 if value is None else args.value_dim
        take(&views, out, &p.out, ALL_AXES, True)
        take(&views, lse, &p.lse, HEAD | ROW, m == ATTEND)
        take(&views, weights, &p.weights, ALL_AXES, m != WEIGHTED_SUM)
        take(&views, scores, &p.scores, ALL_AXES, True)
        take(&views, value_scale, &p.value_scale, HEAD | ROW)
        open_packed(p, q_starts, k_starts, key_rows, &views)
        p.key_request.norm, p.key_request.given = <double*> pointer(norm, &views), pointer(given, &views)
        call.progress = NULL if progress is None else <void*> progress
        if m == BACKWARD:
            open_gradients(&call, &gradients, grad_output, output, grad_lse, delta, d_query, d_key, d_value,
                           d_bias, d_relative_bias, d_relative_key, d_relative_query, relevance, row_factors,
                           key_factors, &views)
            prepare(&call, m)
            gradients.value_dim, p.value_dim = p.value_dim, 0        # the scores of this call use no values
            start(&call, divide_backward, compute_backward, threads, explicit)
        elif m == KEY_STATISTICS:
            request_keys(&p.key_request, request, &views)
            prepare(&call, m)
            start(&call, divide_keys, compute_key_statistics, threads, explicit)
        else:
            # The states of splits hold no statistics, so few rows take a second pass for them.
            if request is not None and p.out.data != NULL and p.rows <= SIZES.few_rows:
                prepare(&call, m)
                start(&call, divide, compute_forward, threads, explicit)
                p.out.data = p.lse.data = p.weights.data = NULL
                p.value_dim = p.kept_scores = 0
            if request is not None:
                request_rows(&p.row_request, request, &views)
            prepare(&call, m)
            start(&call, divide, compute_forward, threads, explicit)
        return plan_of(&call)
    finally:
        close_arrays(&views)


include "fast_entry.pxi"


def softmax(tuple arrays, tuple shape_of_x, int type, bint logarithm, int threads, bint explicit):
    """Softmax along the last axis; `arrays` are x, out, where (bool or None) and y (or None), of one shape.

    With y, the result of an earlier call, x is the gradient of y, and out receives the gradient of y's input.
    """
    cdef RowCall call
    cdef RowOp* op = &call.op
    cdef Py_ssize_t shape[64]
    cdef Py_ssize_t i
    cdef Views views
    cdef Array** targets = [&op.x, &op.out, &op.where, &op.y]
    memset(&call, 0, sizeof(RowCall))
    views.held = 0
    try:
        for i in range(4):
            take(&views, arrays[i], targets[i], COL, i == 1)
        op.batch.n, op.batch.shape, op.rows = len(shape_of_x) - 1, shape, 1
        for i in range(op.batch.n):
            shape[i] = shape_of_x[i]
            op.rows *= shape[i]
        op.n, op.type, op.logarithm = shape_of_x[op.batch.n], type, logarithm
        op.columns = columns_of(op) if op.y.data == NULL else 0
        start_rows(&call, threads, explicit)
    finally:
        close_arrays(&views)


def multiply_pairs(bint on):
    """Multiply bfloat16 in pairs or not: makes the module that both share `avx512bf16` or `avx512`."""
    use_bf16_dot(on)


def threads_now():
    """Number of threads that OpenMP would use for a call from this thread now."""
    return default_threads()


def openmp():
    """Date (yyyymm) of the OpenMP version that the kernels are built with, 0 without OpenMP."""
    return openmp_version()
