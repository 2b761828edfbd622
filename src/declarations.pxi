# Declarations of the C headers that Cython uses.

from libc.stdint cimport int32_t, int64_t

cdef extern from "call/process.h" nogil:
    int watch_forks()
    int openmp_version()
    int default_threads()
    int enter_threads(int threads, int explicit_number)
    void leave_threads(int threads)
    int possible_threads(int threads)
    Py_ssize_t share_of_l2(Py_ssize_t share)
    double seconds()
    void* aligned_memory(size_t bytes)
    void free_aligned(void* memory)
    char* scratch_memory(size_t bytes, char* local, size_t size)
    void free_scratch(char* memory, const char* local, size_t size)
    int granted
    ctypedef struct Trace:
        int threads
        Py_ssize_t room, n
        double phase
        double (*records)[2]
    Trace tracing "trace"
    double thread_seconds()
    void record(double began)

cdef extern from "call/process.h":
    int raise_pending() except -1

cdef extern from "kernels.h" nogil:
    enum: F32, F64, F16, BF16, I8
    enum: ATTEND, SCORES, WEIGHTED_SUM, WEIGHTS_UNDER_LSE, KEY_STATISTICS, BACKWARD
    enum: PACKED, STRIPS, FUSED, PATHS
    enum: GROUP_ROWS
    enum: WANT_QUERY, WANT_KEY, WANT_VALUE, WANT_BIAS, WANT_TABLES
    enum: PAIRED
    int bf16_dot
    void use_bf16_dot(int on)
    const char** PATH_NAMES

    ctypedef int Flag
    ctypedef Py_ssize_t Count
    void add_atomically(Count* count, Py_ssize_t n)
    Py_ssize_t ix_min(Py_ssize_t, Py_ssize_t)
    Py_ssize_t ix_max(Py_ssize_t, Py_ssize_t)
    Py_ssize_t ceil_div(Py_ssize_t, Py_ssize_t)
    Py_ssize_t round_up(Py_ssize_t, Py_ssize_t)
    ctypedef struct Range:
        Py_ssize_t start, stop

    ctypedef struct Array:
        char* data
        int dtype
        Py_ssize_t n_batch
        const Py_ssize_t* shape
        const Py_ssize_t* strides
        Py_ssize_t head, row, col
        const int64_t* starts

    ctypedef struct Batch:
        Py_ssize_t n
        const Py_ssize_t* shape

    ctypedef struct RowRequest:
        int any, sums
        double* norm
        void* entropy
        void* max
        void* position
        void* distance
        void* top
        int64_t* top_keys
        Py_ssize_t k
        const void* given

    ctypedef struct KeyRequest:
        const double* norm
        const void* given
        const void* row_weights
        const int64_t* order
        Py_ssize_t walk
        void* mass
        void* max
        void* visible
        int64_t* hits
        double threshold
        void* map
        int map_max
        const int64_t* row_bin
        const double* bin_rows
        Py_ssize_t row_bins, key_bins
        const int64_t* slot
        const int64_t* slot_start
        const int64_t* slot_bin
        void* products
        const void* factors
        Py_ssize_t columns
        int nonfinite_factors

    ctypedef struct Params:
        Array query, key, value, out, lse, weights, scores
        Array mask, block_mask, key_indices, key_mask, bias, relative, q_offset, k_positions, sinks, slopes
        Array q_segments, k_segments
        Array q_lengths, kv_lengths
        Array q_starts, k_starts, key_rows, key_scale, value_scale, relative_key, relative_query
        const int32_t* relative_index
        Py_ssize_t table_rows, table_bytes, tables_bytes, row_stride, key_products
        char* tables
        Batch batch
        Py_ssize_t batches, q_heads, kv_heads, heads_per_kv, q_len, kv_len, head_dim, value_dim
        int mode, type, pairs, causal
        Py_ssize_t left, right
        double scale, softcap, exponent, unit
        Py_ssize_t list_keys, list_heads
        Py_ssize_t mask_rows, mask_keys, mask_row, mask_key
        int raw_scores, flip, by_position, masked, bias_alone
        Py_ssize_t rows
        int path, unfused
        Py_ssize_t group_rows, block_q, block_k, q_blocks, k_blocks, split_k, splits
        int shared, parts, next_head, copy_queries
        Py_ssize_t kept_scores, depth_stride, value_stride, width, pack_bytes, scratch_bytes, state_bytes
        RowRequest row_request
        KeyRequest key_request
        int n_threads
        Flag stop

    ctypedef struct Sizes:
        Py_ssize_t max_block_k, min_block_k, split_k, few_rows, block_q, task_share, keep_share, own_share, part_rows
        Py_ssize_t long_part_rows

    const Sizes SIZES

    ctypedef struct Packed:
        void* keys
        void* values

    ctypedef struct Task:
        int thread
        void* s
        Packed packed

    ctypedef struct GradientScratch:
        pass

    ctypedef struct Gradients:
        Array grad_out, output, grad_lse, delta
        Array query, key, value, bias, relative, relative_key, relative_query, row_factors, key_factors
        int relevance
        Params products
        Py_ssize_t value_dim, factor_dim, stride, value_stride, factor_stride, accumulators, base, row_tasks, tables
        Py_ssize_t bias_rows, bias_keys, bias_heads

    ctypedef struct Format:
        int real, lanes, panel, packed

    ctypedef struct RowOp:
        Array x, out, where, y
        Batch batch
        Py_ssize_t rows, n, columns, column_vectors, lead
        int type, logarithm, stream

    ctypedef struct RowCall:
        RowOp op
        char* scratch
        Py_ssize_t scratch_bytes, pieces, of_a_task
        double next_poll
        Flag stop

    enum: MAX_COLUMN_VECTORS, ROW_KEPT, ROW_CHUNK, ROW_IN_TURN, ROW_GAP, TOGETHER

    ctypedef struct Call:
        Params p
        const Kernels* kernels
        const Format* format
        Gradients* gradients
        size_t bytes
        char* memory
        char* scratch
        char* packed
        char* states
        double* row_norms
        double* bins
        Py_ssize_t first_head, heads, first_split, round_splits, chunk, chunks
        double next_poll
        void* progress
        Py_ssize_t total
        Count done

    ctypedef struct Kernels:
        void (*pack)(Call*, Task*, Py_ssize_t, Packed) noexcept nogil
        void (*pack_table)(Call*, Py_ssize_t) noexcept nogil
        void (*attend)(Call*, Task*) noexcept nogil
        void (*split)(Call*, Task*, char*) noexcept nogil
        void (*merge)(Call*, Task*, char*, Py_ssize_t, Py_ssize_t, int) noexcept nogil
        void (*dense)(Call*, Task*, Py_ssize_t, int) noexcept nogil
        void (*key_statistics)(Call*, Task*, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*maps)(Call*, Task*, Py_ssize_t) noexcept nogil
        void (*deltas)(Call*, Task*) noexcept nogil
        void (*gradients)(Call*, Task*, Py_ssize_t, Range, Range, int) noexcept nogil
        void (*copy_table)(Call*, Py_ssize_t) noexcept nogil
        void (*softmax_rows)(RowCall*, int, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*softmax_columns)(RowCall*, int, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*softmax_backward)(RowCall*, int, Py_ssize_t, Py_ssize_t) noexcept nogil

    const Kernels KERNELS[2]
    const Format FORMATS[3]
    const double POLL_SECONDS
    int choose_path(const Params*, const Format*, int* unfused)
    int path_of_rows(const Params*, const Format*)
    Py_ssize_t keys_of_block(const Params*, const Format*, int path)
    int for_statistics(const Params*)
    int multiplies_pairs(const Params*)
    Py_ssize_t rows_of_strip(const Format*)
    Py_ssize_t padded(Py_ssize_t)
    Py_ssize_t packed_bytes(const Params*, const Format*)
    Py_ssize_t count_tables(const Array*, Py_ssize_t)
    Py_ssize_t measure_tables(Params*, const Format*)
    void measure_key_products(Params*)
    Packed packed_at(const Params*, const Format*, char*)
    int contiguous(const Params*, const Format*, const Array*)
    Py_ssize_t carve_task(const Params*, const Format*, char*, Task*)
    Py_ssize_t table_rows_bytes(const Params*, const Gradients*, const Format*)
    Py_ssize_t carve_gradients(const Params*, const Gradients*, const Format*, char*, GradientScratch*)
    void open_head(const Params*, Task*, Py_ssize_t head)
    void open_task(const Params*, Task*, Py_ssize_t head, Py_ssize_t block, Py_ssize_t split)
    Py_ssize_t batch_offset(const Array*, const Batch*, Py_ssize_t)
    void poll(Call*, int thread)
    void poll_rows(RowCall*, int thread)
    ctypedef unsigned fp_state
    fp_state fp_enter()
    void fp_leave(fp_state)

# After the headers, so that only Cython's own code is compiled for size: saves 16 of 260 kB of a compressed module.
cdef extern from *:
    """
    #if defined(__GNUC__) && !defined(__clang__)
    #pragma GCC optimize ("Os")
    #endif
    """
