"""The entry points of one instruction set: arrays to Params, one scratch allocation, the loops without the GIL."""

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


def attend(args, int threads, bint explicit, *, value=None, out=None, lse=None, weights=None, key_scale=None,
           value_scale=None, q_starts=None, k_starts=None):
    """Output, lse and weights, those that are given, of the checked arguments `args`. Returns the Plan of the call.

    `key_scale` and `value_scale` are the factors of int8 rows; `q_starts` and `k_starts` where packed sequences start. For
    `threads` see enter_threads().
    """
    cdef Call call
    cdef Py_ssize_t shape[64]
    cdef Views views
    open_call(&call, &views)
    try:
        set_sizes(&call.p, shape, args)
        open_operands(&call.p, args, &views)
        open_value(&call.p, args, value, &views)
        take(&views, out, &call.p.out, ALL_AXES, True)
        take(&views, lse, &call.p.lse, HEAD | ROW, True)
        take(&views, weights, &call.p.weights, ALL_AXES, True)
        take(&views, key_scale, &call.p.key_scale, HEAD | ROW)
        take(&views, value_scale, &call.p.value_scale, HEAD | ROW)
        open_packed(&call.p, q_starts, k_starts, &views)
        return finish_call(&call, ATTEND, threads, explicit)
    finally:
        close_arrays(&views)


def scores(args, int threads, bint explicit, *, scores, key_scale=None):
    """Scores of every place."""
    cdef Call call
    cdef Py_ssize_t shape[64]
    cdef Views views
    open_call(&call, &views)
    try:
        set_sizes(&call.p, shape, args)
        open_operands(&call.p, args, &views)
        take(&views, scores, &call.p.scores, ALL_AXES, True)
        take(&views, key_scale, &call.p.key_scale, HEAD | ROW)
        return finish_call(&call, SCORES, threads, explicit)
    finally:
        close_arrays(&views)


def weights_under_lse(args, int threads, bint explicit, *, lse, weights):
    """Weights of every place, given the lse of each row."""
    cdef Call call
    cdef Py_ssize_t shape[64]
    cdef Views views
    open_call(&call, &views)
    try:
        set_sizes(&call.p, shape, args)
        open_operands(&call.p, args, &views)
        take(&views, lse, &call.p.lse, HEAD | ROW)
        take(&views, weights, &call.p.weights, ALL_AXES, True)
        return finish_call(&call, WEIGHTS_UNDER_LSE, threads, explicit)
    finally:
        close_arrays(&views)


def weighted_sum(args, int threads, bint explicit, *, value, weights, out):
    """Output from given weights; `args` has no query and key."""
    cdef Call call
    cdef Py_ssize_t shape[64]
    cdef Views views
    open_call(&call, &views)
    try:
        set_sizes(&call.p, shape, args)
        open_value(&call.p, args, value, &views)
        call.p.left = call.p.right = -1
        call.p.scale = 1
        take(&views, weights, &call.p.weights, ALL_AXES)
        take(&views, out, &call.p.out, ALL_AXES, True)
        return finish_call(&call, WEIGHTED_SUM, threads, explicit)
    finally:
        close_arrays(&views)


cdef void open_call(Call* call, Views* views):
    memset(call, 0, sizeof(Call))
    views.held = 0


cdef Plan finish_call(Call* call, int mode, int threads, bint explicit):
    prepare(call, mode)
    start(call, divide, compute, threads, explicit)
    return plan_of(call)


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


def threads_now():
    """What OpenMP would use for a call from this thread now."""
    return default_threads()


def openmp():
    """The date of the OpenMP version the kernels are built with (yyyymm), 0 for none."""
    return openmp_version()
